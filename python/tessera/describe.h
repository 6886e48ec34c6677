// SPDX-License-Identifier: Apache-2.0
// How a framework's array becomes a tessera_tensor: the axes of docs/semantics.md in their fixed
// order, whatever the layout of the array. For every binding that is compiled.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

#include "tessera.h"

namespace tessera_front {

[[noreturn]] inline void fail(const std::string& message) { throw std::runtime_error(message); }

struct Array {
  const int64_t* sizes;
  const int64_t* strides;  // in elements
  int64_t rank;
  int32_t dtype;  // enum tessera_dtype
};

// How an array's axes become those of tessera_tensor: right-aligned, missing ones of extent 1, then
// in the order of the format of its side. Packed formats lack the batch axis.
enum class Side : uint8_t { kNone, kQuery, kKey };
struct Rule {
  uint8_t axes;
  Side packs = Side::kNone;     // lacks its first axis when this side is packed
  Side permutes = Side::kNone;  // has the order of axes of this side's format
  bool broadcasts = false;      // any leading axis may be missing
  bool blocks = false;          // the last axis, of blocks, may be missing
};

namespace rules {
inline constexpr Rule kQuery{4, Side::kQuery, Side::kQuery}, kKey{4, Side::kKey, Side::kKey};
inline constexpr Rule kDense{4, Side::kNone, Side::kNone, true}, kRanges{4, Side::kQuery};
inline constexpr Rule kHeads{2, Side::kNone, Side::kNone, true}, kPages{2}, kVector{1};
inline constexpr Rule kScale{3, Side::kNone, Side::kNone, true, true};
inline constexpr Rule kOne{1, Side::kNone, Side::kNone, true};
inline constexpr Rule kIdsQ{2, Side::kQuery}, kIdsK{2, Side::kKey}, kRows{3, Side::kQuery};
inline constexpr Rule kAll[TESSERA_NUM_TENSORS] = {
#define TESSERA_TENSOR(INDEX, name, keyword, rank, role, rule) rule,
#include "core/problem/tensors.def"
#undef TESSERA_TENSOR
};
}  // namespace rules

// Fills problem.tensor[index]. The formats of the problem are set; with pages, k and v are
// [pages, page_size, hk, d].
inline void describe(tessera_problem& problem, int index, bool paged, const Array& array) {
  const Rule& rule = rules::kAll[index];
  const int formats[] = {TESSERA_BSHD, problem.format_q, paged ? TESSERA_BSHD : problem.format_kv};
  const auto format = [&](Side side) { return formats[static_cast<int>(side)]; };
  const int rank = static_cast<int>(array.rank);
  const int axes = rule.blocks && rank < rule.axes ? rule.axes - 1 : rule.axes;
  const int missing = axes - rank;
  if (array.dtype == TESSERA_NONE || missing < 0 ||
      (!rule.broadcasts && missing != (format(rule.packs) == TESSERA_THD))) {
    fail("tessera: tensor " + std::to_string(index) +
         " has a dtype or a number of axes that is never legal");
  }
  tessera_tensor& tensor = problem.tensor[index];
  tensor.dtype = array.dtype;
  for (int i = 0; i < rule.axes; ++i) {
    const bool given = i >= missing && i < axes;
    tensor.extent[i] = given ? array.sizes[i - missing] : 1;
    tensor.stride[i] = given ? array.strides[i - missing] : 0;
  }
  const int order = format(rule.permutes);
  if (order == TESSERA_SBHD || order == TESSERA_BHSD) {
    const int first = order == TESSERA_SBHD ? 0 : 1;
    std::swap(tensor.extent[first], tensor.extent[first + 1]);
    std::swap(tensor.stride[first], tensor.stride[first + 1]);
  }
}

}  // namespace tessera_front
