// SPDX-License-Identifier: Apache-2.0
// What of a PyTorch tensor makes a tessera_tensor.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

#include "../describe.h"

namespace tessera_torch {

using tessera_front::fail;
using torch::headeronly::ScalarType;

inline void check(AOTITorchError error) {
  if (error != 0) fail("tessera: PyTorch refused a call of its C interface");
}

inline constexpr std::pair<ScalarType, int32_t> kTypes[] = {
    {ScalarType::Float, TESSERA_FP32},         {ScalarType::BFloat16, TESSERA_BF16},
    {ScalarType::Half, TESSERA_FP16},          {ScalarType::Double, TESSERA_FP64},
    {ScalarType::Float8_e4m3fn, TESSERA_E4M3}, {ScalarType::Float8_e5m2, TESSERA_E5M2},
    {ScalarType::Bool, TESSERA_BOOL},          {ScalarType::Int, TESSERA_INT32},
    {ScalarType::Long, TESSERA_INT64}};

inline int32_t dtype_of(ScalarType scalar_type) {
  for (const auto& [type, code] : kTypes) {
    if (scalar_type == type) return code;
  }
  return TESSERA_NONE;
}

// PyTorch's number of enum tessera_dtype.
inline int32_t scalar_type_of(int32_t dtype) {
  for (const auto& [type, code] : kTypes) {
    if (dtype == code) return static_cast<int32_t>(type);
  }
  fail("tessera: a dtype that PyTorch has no number for");
}

struct Layout {
  const int64_t* sizes;
  const int64_t* strides;
  int64_t rank;
  int32_t scalar_type;

  Layout(const int64_t* sizes, const int64_t* strides, int64_t rank, int32_t scalar_type)
      : sizes(sizes), strides(strides), rank(rank), scalar_type(scalar_type) {}
  explicit Layout(const torch::stable::Tensor& tensor) {
    check(aoti_torch_get_sizes(tensor.get(), const_cast<int64_t**>(&sizes)));
    check(aoti_torch_get_strides(tensor.get(), const_cast<int64_t**>(&strides)));
    check(aoti_torch_get_dim(tensor.get(), &rank));
    check(aoti_torch_get_dtype(tensor.get(), &scalar_type));
  }
};

// Strides of a new tensor of `sizes` without gaps, whose axes but the last lie in memory in the order of
// `like` (null: row-major). Axes that `like` repeats (stride 0) stay beside their neighbours: the rule of
// PyTorch's empty_like, which _tensors.py asks for fake tensors.
inline std::array<int64_t, 4> dense_strides(const int64_t* sizes, const int64_t* like,
                                            int64_t rank) {
  std::array<int64_t, 4> inner_first{}, strides{};
  for (int64_t i = 0; i < rank; ++i) inner_first[i] = rank - 1 - i;
  const auto is_outside = [&](int64_t a, int64_t b) {  // 1: a is, -1: b is, 0: either may be
    if (like[a] == 0 || like[b] == 0) return 0;
    if (like[a] != like[b]) return like[a] > like[b] ? 1 : -1;
    return sizes[a] > sizes[b] ? 1 : 0;
  };
  for (int64_t i = 2; like != nullptr && i < rank; ++i) {
    for (int64_t at = i, below = i - 1; below > 0; --below) {
      const int order = is_outside(inner_first[below], inner_first[at]);
      if (order < 0) break;
      if (order > 0) std::swap(inner_first[below], inner_first[std::exchange(at, below)]);
    }
  }
  int64_t step = 1;
  for (int64_t i = 0; i < rank; ++i) {
    strides[inner_first[i]] = step;
    step *= std::max<int64_t>(sizes[inner_first[i]], 1);
  }
  return strides;
}

// Fills problem.tensor[index]; see describe.h.
inline void describe(tessera_problem& problem, int index, bool paged, const Layout& layout) {
  tessera_front::describe(problem, index, paged,
                          {layout.sizes, layout.strides, layout.rank,
                           dtype_of(static_cast<ScalarType>(layout.scalar_type))});
}

}  // namespace tessera_torch
