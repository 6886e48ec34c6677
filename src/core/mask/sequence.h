// SPDX-License-Identifier: Apache-2.0
// One sequence of the batch, resolved from lengths on the host: where its rows are, and its band.
// Kernels on a GPU do the same on the device from the same rules (src/cuda/common).
#pragma once

#include <algorithm>

#include "core/mask/band.h"
#include "core/problem/problem.h"

namespace tessera {

struct Sequence {
  int64_t n;        // index in the batch
  int64_t first_q;  // thd: row of the packed buffer where query 0 is stored; otherwise 0
  int64_t first_k;  // thd likewise for keys (not with pages)
  int64_t batch_q;  // index on the batch axis of q, o, ...: n, or 0 for thd
  int64_t batch_k;  // index on the batch axis of k, v: n, or 0 for thd; unused with pages
  int64_t q_start;  // position of query 0
  int64_t k_start;  // and of key 0
  Band band;        // rows and keys are counted from 0

  int64_t len_q() const { return band.len_q; }
  int64_t len_k() const { return band.len_k; }
};

// Window sides beyond 2^30 become 2^30, which is more than 32-bit positions reach, where Int has 32
// bits; so do those of sequences that have windows of their own, for whoever asks without a sequence.
// The problem is validated.
template <typename Int>
BasicBandRule<Int> band_rule_of(const Problem& p) {
  const bool by_sequence = given(p, TESSERA_WINDOWS);
  const auto side = [&](int64_t reach) {
    constexpr int64_t kFar = int64_t{1} << 30, kMost = sizeof(Int) == 4 ? kFar : INT64_MAX;
    if (by_sequence) return static_cast<Int>(kFar);
    return static_cast<Int>(has(p, TESSERA_WINDOW) ? std::min(reach, kMost) : -1);
  };
  return {.bottom_right = p.align == TESSERA_ALIGN_BOTTOM_RIGHT,
          .window = {.left = side(p.window_left),
                     .right = has(p, TESSERA_CAUSAL) ? 0 : side(p.window_right)},
          .shift = static_cast<Int>(p.shift)};
}

// A mask by position, so that the problem has a diagonal: causal, or a window with a bounded side.
inline bool has_band(const Problem& p) { return band_rule_of<int64_t>(p).hides(); }

// Sequence n of a validated, normalised problem whose buffers are on the host.
Sequence sequence_of(const Problem& problem, const Buffers& buffers, int64_t n);

// How many sequences, from the first, tell of all: 1 where what makes one differ from another is not
// given or expanded, so that a batch of 2^40 of them need not be walked.
int64_t distinct_sequences(const Problem& problem);

// Rows [lo, hi) of a side's storage that belong to sequence n when every byte of the tensor must be
// written: its own rows, then padding or the gap up to the next sequence (the first sequence also
// owns what is stored before it, the last one the tail). Nobody owns a row if there is no sequence:
// a packed buffer with batch 0 is filled by whoever walks the batch.
Interval owned_rows_q(const Problem& problem, const Buffers& buffers, int64_t n);
Interval owned_rows_k(const Problem& problem, const Buffers& buffers, int64_t n);

// Element i of a length array (int32 or int64, any stride).
int64_t length_at(const Problem& problem, const Buffers& buffers, int index, int64_t i);

}  // namespace tessera
