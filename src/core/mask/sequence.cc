// SPDX-License-Identifier: Apache-2.0
#include "core/mask/sequence.h"

namespace tessera {
namespace {

// What a side of the problem calls its tensors.
struct Side {
  int tensor, seqlens, cu_seqlens, cu_seqlens_padded;
};
constexpr Side kQuerySide{TESSERA_Q, TESSERA_SEQLENS_Q, TESSERA_CU_SEQLENS_Q,
                          TESSERA_CU_SEQLENS_Q_PADDED};
constexpr Side kKeySide{TESSERA_K, TESSERA_SEQLENS_K, TESSERA_CU_SEQLENS_K,
                        TESSERA_CU_SEQLENS_K_PADDED};

// Row of the packed buffer where sequence n begins; batch answers where the last one ends.
int64_t packed_start(const Problem& p, const Buffers& b, const Side& side, int64_t n) {
  const int index = given(p, side.cu_seqlens_padded) ? side.cu_seqlens_padded : side.cu_seqlens;
  return length_at(p, b, index, n);
}

int64_t length_of(const Problem& p, const Buffers& b, const Side& side, int64_t extent, int64_t n) {
  if (given(p, side.cu_seqlens)) {
    return length_at(p, b, side.cu_seqlens, n + 1) - length_at(p, b, side.cu_seqlens, n);
  }
  return given(p, side.seqlens) ? length_at(p, b, side.seqlens, n) : extent;
}

Interval owned_rows(const Problem& p, const Buffers& b, const Side& side, int64_t extent,
                    int64_t n) {
  if (!given(p, side.cu_seqlens)) return {0, extent};
  const int64_t batch = p.tensor[side.cu_seqlens].extent[0] - 1;
  return {n == 0 ? 0 : packed_start(p, b, side, n),
          n == batch - 1 ? extent : packed_start(p, b, side, n + 1)};
}

int64_t load_integer(const void* data, int64_t at, int32_t dtype) {
  return dtype == TESSERA_INT32 ? static_cast<const int32_t*>(data)[at]
                                : static_cast<const int64_t*>(data)[at];
}

}  // namespace

Sequence sequence_of(const Problem& p, const Buffers& b, int64_t n) {
  const Sizes sizes = sizes_of(p);
  Sequence sequence{};
  sequence.n = n;
  sequence.first_q = is_thd_q(p) ? packed_start(p, b, kQuerySide, n) : 0;
  sequence.first_k = is_thd_k(p) ? packed_start(p, b, kKeySide, n) : 0;
  sequence.batch_q = is_thd_q(p) ? 0 : n;
  sequence.batch_k = is_thd_k(p) ? 0 : n;
  const auto element = [&](int index) { return given(p, index) ? length_at(p, b, index, n) : 0; };
  sequence.q_start = element(TESSERA_Q_START);
  sequence.k_start = element(TESSERA_K_START);
  BandRule rule = band_rule_of<int64_t>(p);
  if (given(p, TESSERA_WINDOWS)) {
    const Tensor& windows = p.tensor[TESSERA_WINDOWS];
    const auto side = [&](int64_t axis) {
      const int64_t at = n * windows.stride[0] + axis * windows.stride[1];
      return load_integer(b.data[TESSERA_WINDOWS], at, windows.dtype);
    };
    rule.window = {side(0), side(1)};
  }
  sequence.band = Band::of(rule, length_of(p, b, kQuerySide, sizes.sq, n),
                           length_of(p, b, kKeySide, sizes.sk, n),
                           element(TESSERA_SHIFT) + sequence.q_start - sequence.k_start);
  return sequence;
}

Interval owned_rows_q(const Problem& problem, const Buffers& buffers, int64_t n) {
  return owned_rows(problem, buffers, kQuerySide, sizes_of(problem).sq, n);
}

Interval owned_rows_k(const Problem& problem, const Buffers& buffers, int64_t n) {
  return owned_rows(problem, buffers, kKeySide, sizes_of(problem).sk, n);
}

int64_t length_at(const Problem& problem, const Buffers& buffers, int index, int64_t i) {
  const Tensor& t = problem.tensor[index];
  return load_integer(buffers.data[index], i * t.stride[0], t.dtype);
}

int64_t distinct_sequences(const Problem& p) {
  const int64_t batch = sizes_of(p).batch;
  for (const int index :
       {TESSERA_SEQLENS_Q, TESSERA_SEQLENS_K, TESSERA_CU_SEQLENS_Q, TESSERA_CU_SEQLENS_K,
        TESSERA_CU_SEQLENS_Q_PADDED, TESSERA_CU_SEQLENS_K_PADDED, TESSERA_Q_START, TESSERA_K_START,
        TESSERA_SHIFT, TESSERA_WINDOWS}) {
    if (given(p, index) && p.tensor[index].stride[0] != 0) return batch;
  }
  return std::min<int64_t>(batch, 1);
}

}  // namespace tessera
