// SPDX-License-Identifier: Apache-2.0
// Params: what a kernel is told. Plain data, passed by value as a __grid_constant__ argument; built
// on the host from the problem and its buffers, with every default resolved.
#pragma once

#include <cstdint>

#include "core/mask/narrow.h"
#include "tessera.h"

namespace tessera::cuda {

// Positions in 32 bits.
using Interval = BasicInterval<int32_t>;
using BandRule = BasicBandRule<int32_t>;
using Band = BasicBand<int32_t>;

// A tensor as a kernel sees it. Axes of extent 1 have stride 0, so broadcasting is plain indexing.
struct View {
  void* data;            // device; null: not given
  int64_t stride[4];     // elements, axes as tessera_index says
  int32_t dtype;         // enum tessera_dtype
  int32_t vector_bytes;  // 16, 8, 4, 2 or 1: divides the address of every row
};

// The tensors that kernels read and write: those of enum tessera_index up to here. Later ones are
// refused (core/choose/unbuilt.h); a kernel that learns one gives it a place behind these, so that
// the arguments of all kernels grow by no more than is used.
inline constexpr int kKernelTensors = TESSERA_DALIBI_SLOPES + 1;
static_assert(kKernelTensors == 32, "kernel arguments have grown: is every tensor in use?");

// Where the sequences of a call stand in whole ones, and what their own windows are. Views are [b];
// null: 0 everywhere. windows: [b, 2], or null.
struct Positions {
  View q_start, k_start, shift, windows;
  BasicBandRule<int64_t> rule;
};

// Positions and extents fit in 31 bits (the backends refuse longer sequences); offsets of elements
// are 64-bit everywhere.
struct Params : BandRule {
  View tensor[kKernelTensors];

  int32_t batch;          // sequences; a packed problem of none counts as one of length 0
  int32_t sq, sk;         // extents: padded length, tokens of a packed side, pages x page size
  int32_t hq, hk, group;  // heads; group = hq / hk
  int32_t dqk, dv;        // head dims
  int32_t thd_q, thd_k;   // sides that are packed
  // Rows and keys that a dense bias or mask over packed sequences has, which positions count from
  // its first; tokens where none has the axis.
  int32_t longest_q, longest_k;
  int32_t page_size;         // 0: no pages
  int32_t max_pages;         // of one sequence
  int32_t pages_k, pages_v;  // in each pool

  uint32_t flags;      // enum tessera_flags
  int32_t num_ranges;  // key ranges of a row: 0, 1 or 2

  float softmax_scale;
  float softcap;               // read with TESSERA_SOFTCAP
  uint32_t dropout_threshold;  // read with TESSERA_DROPOUT; core/mask/philox.h
  int32_t rng_words;           // of RNG_STATE: 2, or 4
  float dropout_scale;         // 1 without dropout

  int32_t has_positions;  // some are given, or the diagonal does not fit in BandRule
  Positions positions;    // read with has_positions
};
static_assert(sizeof(Params) <= 2048, "kernel arguments are 4 KB, and kernels add their own");

// True if scale * s - scale * max must not be one multiply-add, as it is in every fast forward
// kernel: each weight of a row has the rounding of scale * max in it, 2^-24 of a logit, a factor
// out of all bounds where logits are in the billions. The rich kernels of sm80 round every logit
// before they subtract.
inline bool is_steep(double scale) { return scale > 256; }

// True if a cap is beyond the fast kernels of 16 bits, forward and backward. Their tanh is off by
// 5e-7 at most (TanhPolynomial; by exponentials 2.4e-7), so a logit by 5e-7 of the cap and a weight
// by that part of itself: at a cap of 1000 by 2^-11, as much as fp16 rounds it. The rich kernels of
// sm80 have tanh to 1e-6 of itself. softcap: 0 where there is none.
inline bool is_large_cap(double softcap) { return softcap > 1000; }

// Every row of k and v can be copied by 16 bytes.
TESSERA_HOST_DEVICE bool has_aligned_keys(const Params& p) {
  return p.tensor[TESSERA_K].vector_bytes == 16 && p.tensor[TESSERA_V].vector_bytes == 16;
}

// Slots of a grid over the rows of one side; sequence.cuh says what is in them. Times the heads they
// are at most 2^30 (require_tiles).
TESSERA_HOST_DEVICE int num_tile_slots(bool packed, int extent, int batch, int tile) {
  return packed ? extent / tile + batch + 1 : (extent + tile - 1) / tile * batch;
}

}  // namespace tessera::cuda
