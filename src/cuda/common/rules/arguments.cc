// SPDX-License-Identifier: Apache-2.0
#include "cuda/common/rules/arguments.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "core/count.h"
#include "core/mask/philox.h"
#include "core/mask/sequence.h"

namespace tessera::cuda {
namespace {

// The largest power of two up to 16 that divides the base address and every stride of the tensor
// but the last axis', in bytes: how wide an access to the start of any row may be.
int32_t vector_bytes_of(const Tensor& t, const void* data) {
  uint64_t bits = reinterpret_cast<uintptr_t>(data) | 16;
  for (int axis = 0; axis < 3; ++axis) {
    if (t.extent[axis] > 1) bits |= static_cast<uint64_t>(t.stride[axis] * size_of(t.dtype));
  }
  return static_cast<int32_t>(bits & -bits);
}

int32_t narrow(int64_t value) {
  return static_cast<int32_t>(std::clamp<int64_t>(value, -1, int64_t{1} << 30));
}

// The least extent of the dense biases and masks on an axis, 2 of queries or 3 of keys, which those
// of packed sequences index by position: with positions more than the `tokens` of the call, which
// stand for it where all are broadcast.
int64_t longest_of(const Problem& problem, int axis, int64_t tokens) {
  int64_t longest = -1;
  for (const int index : {TESSERA_BIAS, TESSERA_MASK, TESSERA_DBIAS}) {
    const Tensor& t = problem.tensor[index];
    if (!given(problem, index) || t.extent[axis] == 1) continue;
    longest = longest < 0 ? t.extent[axis] : std::min(longest, t.extent[axis]);
  }
  return longest < 0 ? tokens : longest;
}

}  // namespace

Params params_of(const Problem& problem, const Buffers& buffers) {
  Params p{};
  for (int i = 0; i < kKernelTensors; ++i) {
    p.tensor[i] = view_of(problem.tensor[i], buffers.data[i]);
    for (int axis = tensor_rule(i).rank; axis < 4; ++axis) p.tensor[i].stride[axis] = 0;
  }
  // Slopes of no sequences, [0, hq], have the strides of slopes that all sequences share.
  if (problem.tensor[TESSERA_DALIBI_SLOPES].extent[0] == 0) {
    p.tensor[TESSERA_DALIBI_SLOPES].data = nullptr;
  }
  const Sizes sizes = sizes_of(problem);
  p.batch = narrow(sizes.batch);
  p.sq = narrow(sizes.sq);
  p.sk = narrow(sizes.sk);
  p.hq = narrow(sizes.hq);
  p.hk = narrow(sizes.hk);
  p.group = narrow(sizes.group());
  p.dqk = narrow(sizes.dqk);
  p.dv = narrow(sizes.dv);
  p.thd_q = is_thd_q(problem);
  p.thd_k = is_thd_k(problem);
  p.longest_q = narrow(longest_of(problem, 2, sizes.sq));
  p.longest_k = narrow(longest_of(problem, 3, sizes.sk));
  if (p.batch == 0 && (p.thd_q || p.thd_k)) {
    // Packed rows of no sequences are rows of a sequence of length 0; a padded side has none then.
    p.batch = 1;
    if (!p.thd_q) p.sq = 0;
    if (!p.thd_k) p.sk = 0;
    for (const int index : {TESSERA_SEQLENS_Q, TESSERA_SEQLENS_K}) p.tensor[index].data = nullptr;
  }
  if (is_paged(problem)) {
    p.page_size = narrow(problem.tensor[TESSERA_K].extent[1]);
    p.max_pages = narrow(problem.tensor[TESSERA_PAGE_TABLE_K].extent[1]);
    p.pages_k = narrow(problem.tensor[TESSERA_K].extent[0]);
    p.pages_v = narrow(problem.tensor[TESSERA_V].extent[0]);
    if (!given(problem, TESSERA_PAGE_TABLE_V)) {
      p.tensor[TESSERA_PAGE_TABLE_V] = p.tensor[TESSERA_PAGE_TABLE_K];
    }
  }

  const auto position = [&](int index) {
    return sizes.batch == 0 ? View{} : view_of(problem.tensor[index], buffers.data[index]);
  };
  p.has_positions = has_positions(problem);
  p.positions = {.q_start = position(TESSERA_Q_START),
                 .k_start = position(TESSERA_K_START),
                 .shift = position(TESSERA_SHIFT),
                 .windows = position(TESSERA_WINDOWS),
                 .rule = band_rule_of<int64_t>(problem)};

  p.flags = problem.flags;
  static_cast<BandRule&>(p) = band_rule_of<int32_t>(problem);
  if (given(problem, TESSERA_KEY_RANGES)) {
    p.num_ranges = static_cast<int32_t>(problem.tensor[TESSERA_KEY_RANGES].extent[3] / 2);
  }

  p.softmax_scale = static_cast<float>(softmax_scale_of(problem, buffers));
  p.softcap = static_cast<float>(softcap_of(problem, buffers));
  p.dropout_scale = 1;
  if (has(problem, TESSERA_DROPOUT)) {
    p.dropout_threshold = static_cast<uint32_t>(std::floor(buffers.dropout_p * 65536 + 0.5));
    p.dropout_scale = static_cast<float>(Dropout{0, 0, 0, p.dropout_threshold}.scale());
    p.rng_words = static_cast<int32_t>(problem.tensor[TESSERA_RNG_STATE].extent[0]);
  }
  return p;
}

View view_of(const Tensor& t, void* data) {
  View view{};
  if (t.dtype == TESSERA_NONE) return view;
  view.data = data;
  view.dtype = t.dtype;
  view.vector_bytes = vector_bytes_of(t, data);
  for (int axis = 0; axis < 4; ++axis) view.stride[axis] = t.extent[axis] > 1 ? t.stride[axis] : 0;
  return view;
}

Tensor dense_like(const Tensor& like, int32_t dtype) {
  Tensor t = like;
  t.dtype = dtype;
  const int64_t piece = 16 / size_of(dtype);
  Count stride = Count{t.extent[3]}.up_to(piece);
  t.stride[3] = 1;
  for (int axis = 2; axis >= 0; --axis) {
    t.stride[axis] = stride.value();
    stride *= t.extent[axis];
  }
  return t;
}

int64_t bytes_of(const Tensor& dense) {
  return (Count{dense.extent[0]} * dense.stride[0] * size_of(dense.dtype)).value();
}

bool has_positions(const Problem& problem) {
  return given(problem, TESSERA_Q_START) || given(problem, TESSERA_K_START) ||
         given(problem, TESSERA_SHIFT) || given(problem, TESSERA_WINDOWS) ||
         std::abs(problem.shift) > kMostShift;
}

const char* counted_from(const Problem& problem, int index) {
  if (!given(problem, index)) return nullptr;
  const bool keys = index == TESSERA_K_START;
  const bool packed = keys ? is_thd_k(problem) : is_thd_q(problem);
  if (has(problem, TESSERA_DROPOUT)) return "dropout";
  if (packed && given(problem, TESSERA_BIAS)) return "a bias";
  if (packed && given(problem, TESSERA_MASK)) return "a mask";
  return keys && given(problem, TESSERA_KEY_RANGES) ? "key_ranges" : nullptr;
}

int64_t most_queries(const Problem& problem) {
  const int64_t extent = sizes_of(problem).sq;
  return has(problem, TESSERA_MAX_SEQLEN_Q) ? std::min(extent, problem.max_seqlen_q) : extent;
}

int64_t most_keys(const Problem& problem) {
  const int64_t extent = sizes_of(problem).sk;
  return has(problem, TESSERA_MAX_SEQLEN_K) ? std::min(extent, problem.max_seqlen_k) : extent;
}

Buffers nominal_buffers(const Problem& problem) {
  Buffers buffers{};
  buffers.struct_size = sizeof buffers;
  buffers.softmax_scale = buffers.softcap = 1;
  buffers.dropout_p = 0.5;
  static char nowhere alignas(256)[256];
  for (int i = 0; i < kKernelTensors; ++i) {
    if (given(problem, i)) buffers.data[i] = nowhere;
  }
  return buffers;
}

}  // namespace tessera::cuda
