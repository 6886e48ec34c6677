// SPDX-License-Identifier: Apache-2.0
// How a PyTorch tensor becomes a tessera_tensor: the axes of docs/semantics.md in their fixed
// order, whatever the layout of the tensor.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

#include "tessera.h"

namespace tessera_torch {

using torch::headeronly::ScalarType;

[[noreturn]] inline void fail(const std::string& message) { throw std::runtime_error(message); }

inline void check(AOTITorchError error) {
  if (error != 0) fail("tessera: PyTorch refused a call of its C interface");
}

inline int32_t dtype_of(ScalarType scalar_type) {
  constexpr std::pair<ScalarType, int32_t> kTypes[] = {
      {ScalarType::Float, TESSERA_FP32},         {ScalarType::BFloat16, TESSERA_BF16},
      {ScalarType::Half, TESSERA_FP16},          {ScalarType::Double, TESSERA_FP64},
      {ScalarType::Float8_e4m3fn, TESSERA_E4M3}, {ScalarType::Float8_e5m2, TESSERA_E5M2},
      {ScalarType::Bool, TESSERA_BOOL},          {ScalarType::Int, TESSERA_INT32},
      {ScalarType::Long, TESSERA_INT64}};
  for (const auto& [type, code] : kTypes) {
    if (scalar_type == type) return code;
  }
  return TESSERA_NONE;
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

// How a tensor's axes become those of tessera_tensor: right-aligned, missing ones of extent 1, then
// in the order of the format of its side. Packed formats lack the batch axis.
enum class Side : uint8_t { kNone, kQuery, kKey };
struct Rule {
  uint8_t axes;
  Side packs = Side::kNone;     // lacks its first axis when this side is packed
  Side permutes = Side::kNone;  // has the order of axes of this side's format
  bool broadcasts = false;      // any leading axis may be missing
};

constexpr Rule rule_of(int index) {
  constexpr Rule kQuery{4, Side::kQuery, Side::kQuery}, kKey{4, Side::kKey, Side::kKey};
  constexpr Rule kDense{4, Side::kNone, Side::kNone, true}, kRanges{4, Side::kQuery};
  constexpr Rule kHeads{2, Side::kNone, Side::kNone, true}, kPages{2}, kVector{1};
  constexpr Rule kIdsQ{2, Side::kQuery}, kIdsK{2, Side::kKey}, kRows{3, Side::kQuery};
  constexpr Rule kRules[TESSERA_NUM_TENSORS] = {
      kQuery,  kKey,   kKey,    kDense,  kDense,  kRanges, kIdsQ,   kIdsK,    // q .. ids_k
      kVector, kHeads, kVector, kVector, kVector, kVector, kVector, kVector,  // sink .. cu_padded
      kPages,  kPages, kHeads,  kHeads,  kVector, kQuery,  kRows,   kVector,  // pages .. max_logit
      kQuery,  kRows,  kQuery,  kKey,    kKey,    kDense,  kVector, kHeads};  // do .. dslopes
  return kRules[index];
}

// Fills problem.tensor[index]. The formats of the problem are set; with pages, k and v are
// [pages, page_size, hk, d].
inline void describe(tessera_problem& problem, int index, bool paged, const Layout& layout) {
  const Rule rule = rule_of(index);
  const int formats[] = {TESSERA_BSHD, problem.format_q, paged ? TESSERA_BSHD : problem.format_kv};
  const auto format = [&](Side side) { return formats[static_cast<int>(side)]; };
  const int missing = rule.axes - static_cast<int>(layout.rank);
  const int32_t dtype = dtype_of(static_cast<ScalarType>(layout.scalar_type));
  if (dtype == TESSERA_NONE || missing < 0 ||
      (!rule.broadcasts && missing != (format(rule.packs) == TESSERA_THD))) {
    fail("tessera: tensor " + std::to_string(index) +
         " has a dtype or a number of axes that is never legal");
  }
  tessera_tensor& tensor = problem.tensor[index];
  tensor.dtype = dtype;
  for (int i = 0; i < rule.axes; ++i) {
    tensor.extent[i] = i < missing ? 1 : layout.sizes[i - missing];
    tensor.stride[i] = i < missing ? 0 : layout.strides[i - missing];
  }
  const int order = format(rule.permutes);
  if (order == TESSERA_SBHD || order == TESSERA_BHSD) {
    const int first = order == TESSERA_SBHD ? 0 : 1;
    std::swap(tensor.extent[first], tensor.extent[first + 1]);
    std::swap(tensor.stride[first], tensor.stride[first + 1]);
  }
}

}  // namespace tessera_torch
