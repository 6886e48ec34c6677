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
inline constexpr Rule kHeads{2, Side::kNone, Side::kNone, true}, kTable{2}, kVector{1};
inline constexpr Rule kScale{3, Side::kNone, Side::kNone, true, true};
inline constexpr Rule kOne{1, Side::kNone, Side::kNone, true};
inline constexpr Rule kIdsQ{2, Side::kQuery}, kIdsK{2, Side::kKey}, kRows{3, Side::kQuery};
inline constexpr Rule kAll[TESSERA_NUM_TENSORS] = {
#define TESSERA_TENSOR(INDEX, name, keyword, rank, role, rule) rule,
#include "core/problem/tensors.def"
#undef TESSERA_TENSOR
};
}  // namespace rules

// The order of an array's axes that have one of their own; with pages, k and v are BSHD.
inline int format_of(const tessera_problem& problem, Side side, bool paged) {
  const int formats[] = {TESSERA_BSHD, problem.format_q, paged ? TESSERA_BSHD : problem.format_kv};
  return formats[static_cast<int>(side)];
}

// Swaps the axes of a tensor in fixed order that its array has the other way round.
inline void permute(int format, int64_t* axes) {
  if (format != TESSERA_SBHD && format != TESSERA_BHSD) return;
  const int first = format == TESSERA_SBHD ? 0 : 1;
  std::swap(axes[first], axes[first + 1]);
}

// Fills problem.tensor[index]. The formats of the problem are set; with pages, k and v are
// [pages, page_size, hk, d].
inline void describe(tessera_problem& problem, int index, bool paged, const Array& array) {
  const Rule& rule = rules::kAll[index];
  const int rank = static_cast<int>(array.rank);
  const int axes = rule.blocks && rank < rule.axes ? rule.axes - 1 : rule.axes;
  const int missing = axes - rank;
  if (array.dtype == TESSERA_NONE || missing < 0 ||
      (!rule.broadcasts && missing != (format_of(problem, rule.packs, paged) == TESSERA_THD))) {
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
  const int order = format_of(problem, rule.permutes, paged);
  permute(order, tensor.extent);
  permute(order, tensor.stride);
}

inline bool is_fp8(int32_t dtype) { return dtype == TESSERA_E4M3 || dtype == TESSERA_E5M2; }

// What tessera_outputs says of an output, of `dtype` unless that is TESSERA_NONE; it checks the whole
// problem besides, 1 us, as tessera_run does. Inputs are described before, strides are not told.
inline void describe_new(tessera_problem& problem, int index, int32_t dtype) {
  constexpr int kOf[] = {TESSERA_Q,    TESSERA_K,    TESSERA_V,
                         TESSERA_BIAS, TESSERA_SINK, TESSERA_ALIBI_SLOPES};
  const tessera_tensor &q = problem.tensor[TESSERA_Q], &v = problem.tensor[TESSERA_V];
  tessera_tensor t{};
  int32_t usual = q.dtype == TESSERA_FP64 ? TESSERA_FP64 : TESSERA_FP32;
  if (index == TESSERA_O) {
    t = q;
    t.extent[3] = v.extent[3];
    usual = is_fp8(q.dtype) ? static_cast<int32_t>(TESSERA_BF16) : q.dtype;
  } else if (index == TESSERA_LSE) {
    t.extent[0] = q.extent[0], t.extent[1] = q.extent[2], t.extent[2] = q.extent[1];
  } else if (index == TESSERA_MAX_LOGIT) {
    t.extent[0] = q.extent[2];
  } else if (index >= TESSERA_DQ && index <= TESSERA_DALIBI_SLOPES) {
    t = problem.tensor[kOf[index - TESSERA_DQ]];
    const int32_t o = problem.tensor[TESSERA_O].dtype;
    const bool narrow = o == TESSERA_BF16 || o == TESSERA_FP16;
    if (t.dtype == TESSERA_NONE) fail("tessera: a gradient of something not given");
    usual = !is_fp8(t.dtype) ? t.dtype : narrow ? o : static_cast<int32_t>(TESSERA_BF16);
  } else if (rules::kAll[index].broadcasts) {  // amax
    t.extent[0] = 1;
  } else {
    fail("tessera: tensor " + std::to_string(index) + " is no output");
  }
  t.dtype = dtype != TESSERA_NONE ? dtype : usual;
  problem.tensor[index] = t;
}

// Says that v is the first columns of k where the arrays of a forward pass are: keys are then read
// once. Called when all inputs are described.
inline void find_v_in_k(tessera_problem& problem, const tessera_buffers& buffers) {
  const tessera_tensor &k = problem.tensor[TESSERA_K], &v = problem.tensor[TESSERA_V];
  bool same = problem.pass == TESSERA_FORWARD && k.dtype == v.dtype &&
              buffers.data[TESSERA_K] != nullptr &&
              buffers.data[TESSERA_K] == buffers.data[TESSERA_V] && v.extent[3] < k.extent[3] &&
              problem.tensor[TESSERA_PAGE_TABLE_V].dtype == TESSERA_NONE;
  for (int axis = 0; axis < 3; ++axis) {
    same = same && k.extent[axis] == v.extent[axis] && k.stride[axis] == v.stride[axis];
  }
  if (same) problem.flags |= TESSERA_V_IN_K;
}

// Makes thd of each side whose format is padded beside lengths of packed sequences: an array of one row is
// that packed buffer, [1, t, h, d] in its own order of axes. Called when all arrays are described.
inline void pack_rows(tessera_problem& problem, bool paged) {
  const auto is_row = [&](int lengths, int rows) {
    return problem.tensor[lengths].dtype != TESSERA_NONE && problem.tensor[rows].extent[0] == 1;
  };
  if (is_row(TESSERA_CU_SEQLENS_Q, TESSERA_Q)) problem.format_q = TESSERA_THD;
  if (!paged && is_row(TESSERA_CU_SEQLENS_K, TESSERA_K)) problem.format_kv = TESSERA_THD;
}

// The sizes of the array of problem.tensor[index], and how many: `rank`, or where that is negative all
// axes that the tensor must have.
inline int sizes_of(const tessera_problem& problem, int index, bool paged, int64_t rank,
                    int64_t* sizes) {
  const Rule& rule = rules::kAll[index];
  int axes = static_cast<int>(rank);
  if (axes < 0) {
    axes = rule.broadcasts ? 0 : rule.axes - (format_of(problem, rule.packs, paged) == TESSERA_THD);
  }
  tessera_tensor tensor = problem.tensor[index];
  permute(format_of(problem, rule.permutes, paged), tensor.extent);
  for (int i = 0; i < axes; ++i) sizes[i] = tensor.extent[rule.axes - axes + i];
  return axes;
}

}  // namespace tessera_front
