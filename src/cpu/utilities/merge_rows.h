// SPDX-License-Identifier: Apache-2.0
// Rows of o as fp32 sums, for merge.cc: the part of it that depends on the instruction set.
#pragma once

#include "cpu/simd/types.h"
#include "tessera.h"

namespace tessera::cpu {
namespace {

template <typename S, typename T>
TESSERA_INLINE void add_row_of(const T* row, int64_t n, float weight, float* sum) {
  constexpr int L = S::kLanes;
  const auto factor = S::set1(weight);
  for (int64_t d = 0; d < n; d += L) {
    const int lanes = static_cast<int>(n - d < L ? n - d : L);
    S::store_n(sum + d, S::fma(factor, S::load_n(row + d, lanes), S::load_n(sum + d, lanes)),
               lanes);
  }
}

template <typename S, typename T>
TESSERA_INLINE void round_row_of(const float* sum, int64_t n, T* row) {
  constexpr int L = S::kLanes;
  for (int64_t d = 0; d < n; d += L) {
    const int lanes = static_cast<int>(n - d < L ? n - d : L);
    S::store_n(row + d, S::load_n(sum + d, lanes), lanes);
  }
}

// sum += weight row, n elements of fp32, bf16 or fp16.
template <typename S>
void add_row(int32_t dtype, const void* row, int64_t n, float weight, float* sum) {
  switch (dtype) {
    case TESSERA_FP32:
      return add_row_of<S>(static_cast<const float*>(row), n, weight, sum);
    case TESSERA_BF16:
      return add_row_of<S>(static_cast<const Bf16*>(row), n, weight, sum);
    default:
      return add_row_of<S>(static_cast<const Fp16*>(row), n, weight, sum);
  }
}

// row = sum, rounded.
template <typename S>
void round_row(int32_t dtype, const float* sum, int64_t n, void* row) {
  switch (dtype) {
    case TESSERA_FP32:
      return round_row_of<S>(sum, n, static_cast<float*>(row));
    case TESSERA_BF16:
      return round_row_of<S>(sum, n, static_cast<Bf16*>(row));
    default:
      return round_row_of<S>(sum, n, static_cast<Fp16*>(row));
  }
}

}  // namespace
}  // namespace tessera::cpu
