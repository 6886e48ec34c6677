// SPDX-License-Identifier: Apache-2.0
// What of a PyTorch tensor makes a tessera_tensor.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>

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

// PyTorch's number of enum tessera_dtype; of TESSERA_NONE, `otherwise`.
inline int32_t scalar_type_of(int32_t dtype, int32_t otherwise) {
  for (const auto& [type, code] : kTypes) {
    if (dtype == code) return static_cast<int32_t>(type);
  }
  return otherwise;
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

// Fills problem.tensor[index]; see describe.h.
inline void describe(tessera_problem& problem, int index, bool paged, const Layout& layout) {
  tessera_front::describe(problem, index, paged,
                          {layout.sizes, layout.strides, layout.rank,
                           dtype_of(static_cast<ScalarType>(layout.scalar_type))});
}

}  // namespace tessera_torch
