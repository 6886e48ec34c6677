// SPDX-License-Identifier: Apache-2.0
// Small legal problems to start from. Shapes: b 2, sq 5, sk 7, hq 4, hk 2, dqk 8, dv 16.
#pragma once

#include <initializer_list>

#include "core/problem/problem.h"

namespace tessera::testing {

// Dense in the order of its own axes.
inline Tensor dense(int32_t dtype, std::initializer_list<int64_t> extents) {
  Tensor t{};
  t.dtype = dtype;
  int rank = 0;
  for (const int64_t extent : extents) t.extent[rank++] = extent;
  int64_t stride = 1;
  for (int axis = rank - 1; axis >= 0; --axis) {
    t.stride[axis] = stride;
    stride *= t.extent[axis] > 0 ? t.extent[axis] : 1;
  }
  return t;
}

inline Problem empty_problem() {
  Problem p{};
  p.struct_size = sizeof p;
  return p;
}

inline Problem forward(int32_t dtype = TESSERA_FP32) {
  Problem p = empty_problem();
  p.tensor[TESSERA_Q] = dense(dtype, {2, 5, 4, 8});
  p.tensor[TESSERA_K] = dense(dtype, {2, 7, 2, 8});
  p.tensor[TESSERA_V] = dense(dtype, {2, 7, 2, 16});
  p.tensor[TESSERA_O] = dense(dtype, {2, 5, 4, 16});
  p.tensor[TESSERA_LSE] = dense(dtype == TESSERA_FP64 ? TESSERA_FP64 : TESSERA_FP32, {2, 4, 5});
  return p;
}

inline Problem backward(int32_t dtype = TESSERA_FP32) {
  Problem p = forward(dtype);
  p.pass = TESSERA_BACKWARD;
  p.tensor[TESSERA_DO] = p.tensor[TESSERA_O];
  p.tensor[TESSERA_DQ] = p.tensor[TESSERA_Q];
  p.tensor[TESSERA_DK] = p.tensor[TESSERA_K];
  p.tensor[TESSERA_DV] = p.tensor[TESSERA_V];
  return p;
}

// Two sequences packed in 9 query and 11 key tokens.
inline Problem packed() {
  Problem p = forward();
  p.format_q = p.format_kv = TESSERA_THD;
  p.tensor[TESSERA_Q] = dense(TESSERA_FP32, {1, 9, 4, 8});
  p.tensor[TESSERA_K] = dense(TESSERA_FP32, {1, 11, 2, 8});
  p.tensor[TESSERA_V] = dense(TESSERA_FP32, {1, 11, 2, 16});
  p.tensor[TESSERA_O] = dense(TESSERA_FP32, {1, 9, 4, 16});
  p.tensor[TESSERA_LSE] = dense(TESSERA_FP32, {1, 4, 9});
  p.tensor[TESSERA_CU_SEQLENS_Q] = dense(TESSERA_INT32, {3});
  p.tensor[TESSERA_CU_SEQLENS_K] = dense(TESSERA_INT32, {3});
  return p;
}

// Keys in 6 pages of 4 tokens, at most 3 for a sequence.
inline Problem paged() {
  Problem p = forward();
  p.tensor[TESSERA_K] = dense(TESSERA_FP32, {6, 4, 2, 8});
  p.tensor[TESSERA_V] = dense(TESSERA_FP32, {6, 4, 2, 16});
  p.tensor[TESSERA_PAGE_TABLE_K] = dense(TESSERA_INT32, {2, 3});
  p.tensor[TESSERA_SEQLENS_K] = dense(TESSERA_INT64, {2});
  return p;
}

}  // namespace tessera::testing
