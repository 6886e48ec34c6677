// SPDX-License-Identifier: Apache-2.0
#include "cuda/cudnn/rules.h"

#include <algorithm>
#include <bit>
#include <string>

#include "core/choose/unbuilt.h"
#include "core/count.h"
#include "core/mask/sequence.h"

namespace tessera::cuda::cudnn {
namespace {

constexpr int kUnit = 8;                  // elements of the 16 bytes that kernels read at once
constexpr int64_t kMostExtent = 1 << 24;  // positions and their sums are 32-bit
// Offsets of elements within one sequence are 32-bit in kernels of sm80.
constexpr int64_t kMostElements = int64_t{1} << 31;

constexpr int kTensors[] = {TESSERA_Q,  TESSERA_K,  TESSERA_V,  TESSERA_O,
                            TESSERA_DO, TESSERA_DQ, TESSERA_DK, TESSERA_DV};

// What no graph of cuDNN does as docs/semantics.md has it, and why.
struct Lack {
  int index;
  const char* text;
};
constexpr Lack kLacks[] = {
    {TESSERA_BIAS,
     "cuDNN does not hide scores below -2^24, and makes NaN of rows that are all -inf"},
    {TESSERA_MASK, "cuDNN has no masks but by position and length"},
    {TESSERA_KEY_RANGES, "cuDNN has no masks but by position and length"},
    {TESSERA_SEGMENT_IDS_Q, "cuDNN has no masks but by position and length"},
    {TESSERA_SINK, "sinks of cuDNN are not wired yet"},
    {TESSERA_ALIBI_SLOPES, "cuDNN has a series of slopes of its own, and takes no others"},
    {TESSERA_PAGE_TABLE_K, "NaN in page tails leaks into cuDNN's results"},
    {TESSERA_K_SCALE, "fp8 of cuDNN is not wired yet"},
    {TESSERA_V_SCALE, "fp8 of cuDNN is not wired yet"},
    {TESSERA_MAX_LOGIT, "cuDNN has it from 9.21 on; it is not wired yet"},
    {TESSERA_Q_START, "cuDNN's diagonals are top_left or bottom_right"},
    {TESSERA_K_START, "cuDNN's diagonals are top_left or bottom_right"},
    {TESSERA_SHIFT, "cuDNN's diagonals are top_left or bottom_right"},
    {TESSERA_WINDOWS, "cuDNN has one window for all sequences"},
    {TESSERA_DLSE, "cuDNN has no gradient of lse"},
};
struct LackOfFlag {
  uint32_t flag;
  const char* text;
};
constexpr LackOfFlag kLacksOfFlags[] = {
    {TESSERA_SOFTCAP, "softcap: cuDNN has no tanh that keeps NaN"},
    {TESSERA_DROPOUT,
     "dropout_p: cuDNN's generator has other counters, so that one state would drop other weights"},
    {TESSERA_SINK_OFF_BY_ONE, "sink=\"off_by_one\": sinks of cuDNN are not wired yet"},
    {TESSERA_BATCH_INVARIANT, "batch_invariant=True: cuDNN does not promise it"},
    {TESSERA_ACCUMULATE, "accumulate=True: cuDNN overwrites its results"},
};

// The backward pass of 9.19 has been looked at on sm90 alone: dq is wrong in rows whose lse is below
// -80, where backend.cc has it made again.
void require_backward(Support& support, const Problem& p, int arch) {
  support.require(arch == 0 || arch == 90, ReasonId::kFeature, Remedy::kNone, [&] {
    return "pass=backward, arch=" + std::to_string(arch) +
           ": cuDNN's dq has been checked on sm90 alone, where it needs a repair";
  });
  support.require(!has(p, TESSERA_DETERMINISTIC), ReasonId::kFeature, Remedy::kNone, [] {
    return std::string("deterministic=True: cuDNN's workspace is quadratic then, on sm90");
  });
  support.require(given(p, TESSERA_DQ) && given(p, TESSERA_DK) && given(p, TESSERA_DV),
                  ReasonId::kFeature, Remedy::kNone,
                  [] { return std::string("dq, dk, dv: cuDNN makes all three or none"); });
  const Sizes s = sizes_of(p);
  support.require(s.sq > 1 || s.sk > 1, ReasonId::kSize, Remedy::kNone,
                  [] { return std::string("sq=1, sk=1: cuDNN has no backward pass of one key"); });
  if (!is_thd_q(p) && !is_thd_k(p)) return;
  constexpr int kDims = 16;  // of the sums that are as long as the tokens
  for (const auto& [name, dim] : {std::pair{"head_dim_qk", s.dqk}, {"head_dim_v", s.dv}}) {
    support.require(
        dim % kDims == 0, ReasonId::kHeadDim, Remedy::kNone, [&, name = name, dim = dim] {
          return std::string(name) + "=" + std::to_string(dim) +
                 ": must be a multiple of 16 beside packed sequences in the backward pass; cuDNN's "
                 "workspace is batch * tokens otherwise";
        });
  }
}

void require_features(Support& support, const Problem& p) {
  for (const Lack& lack : kLacks) {
    support.require(!given(p, lack.index), ReasonId::kFeature, Remedy::kNone, [&] {
      return std::string(name_of(p, lack.index)) + ".shape=" + shape_text(p, lack.index) + ": " +
             lack.text;
    });
  }
  for (const LackOfFlag& lack : kLacksOfFlags) {
    support.require(!has(p, lack.flag), ReasonId::kFeature, Remedy::kNone,
                    [&] { return std::string(lack.text); });
  }
}

void require_dtypes(Support& support, const Problem& p) {
  const int q = p.tensor[TESSERA_Q].dtype;
  support.require(is_16bit(q), ReasonId::kDtype, Remedy::kUseBf16, [&] {
    return "q.dtype=" + std::string(dtype_name(q)) + ": must be bf16 or fp16";
  });
  for (const int index : kTensors) {
    if (!given(p, index)) continue;
    const int dtype = p.tensor[index].dtype;
    support.require(dtype == q, ReasonId::kDtype, Remedy::kUseBf16, [&] {
      return std::string(tensor_rule(index).name) + ".dtype=" + std::string(dtype_name(dtype)) +
             ": must be that of q";
    });
  }
}

// What 9.19 has in both passes: any multiple of 8 up to 128 on all architectures, and more as listed.
bool has_head_dims(int64_t dqk, int64_t dv, int arch) {
  const int64_t most = std::max(dqk, dv);
  if (most <= 128) return true;
  if (arch >= 90 && arch < 100) return most <= 256 && (dqk == dv || std::min(dqk, dv) <= 128);
  if (arch >= 100 && arch < 120) return dqk == 192 && dv == 128;
  return most <= 256;
}

void require_sizes(Support& support, const Problem& p, int arch) {
  const Sizes s = sizes_of(p);
  for (const auto& [name, dim] : {std::pair{"head_dim_qk", s.dqk}, {"head_dim_v", s.dv}}) {
    support.require(
        dim % kUnit == 0, ReasonId::kHeadDim, Remedy::kNone, [&, name = name, dim = dim] {
          return std::string(name) + "=" + std::to_string(dim) + ": must be a multiple of 8";
        });
  }
  support.require(has_head_dims(s.dqk, s.dv, arch), ReasonId::kHeadDim, Remedy::kNone, [&] {
    const char* rule = arch >= 100 && arch < 120 ? "must be at most 128, or 192 and 128"
                       : arch >= 90 && arch < 100
                           ? "must be at most 256, and one at most 128 where they differ"
                           : "must be at most 256";
    return "head_dim_qk=" + std::to_string(s.dqk) + ", head_dim_v=" + std::to_string(s.dv) + ": " +
           rule;
  });
  for (const auto& [name, extent] : {std::pair{"batch", s.batch}, {"sq", s.sq}, {"sk", s.sk}}) {
    support.require(extent > 0 && extent <= kMostExtent, ReasonId::kSize, Remedy::kNone,
                    [&, name = name, extent = extent] {
                      return std::string(name) + "=" + std::to_string(extent) +
                             ": must be in [1, 2^24]";
                    });
  }
  constexpr int64_t kMostGrid = 65535;  // of a grid's y and z
  for (const auto& [name, extent] : {std::pair{"batch", s.batch}, {"num_heads_q", s.hq}}) {
    support.require(
        extent <= kMostGrid, ReasonId::kSize, Remedy::kNone, [&, name = name, extent = extent] {
          return std::string(name) + "=" + std::to_string(extent) + ": must be at most 65535";
        });
  }
  require_tiles(support, p);
}

void require_strides(Support& support, const Problem& p, int index) {
  const Tensor& t = p.tensor[index];
  for (int axis = 0; axis < 3; ++axis) {
    if (t.extent[axis] <= 1) continue;
    const int64_t stride = t.stride[axis];
    support.require(stride > 0 && stride % kUnit == 0 && stride < kMostElements, ReasonId::kLayout,
                    Remedy::kNone, [&] {
                      return std::string(tensor_rule(index).name) + ".stride[" +
                             std::to_string(axis) + "]=" + std::to_string(stride) +
                             ": must be a positive multiple of 8 elements, below 2^31";
                    });
  }
}

// Padded sequences with lengths are passed as packed ones with gaps, since NaN behind a length leaks
// into the results of cuDNN's padded form. Then rows of all heads must lie behind one another.
void require_packed_order(Support& support, const Problem& p, int index) {
  const Tensor& t = p.tensor[index];
  const bool by_rows = t.extent[1] <= 1 || t.extent[2] <= 1 || t.stride[1] >= t.stride[2];
  const bool by_batch = t.extent[0] <= 1 || t.stride[0] >= t.stride[1] * t.extent[1];
  support.require(by_rows && by_batch, ReasonId::kLayout, Remedy::kNone, [&] {
    return std::string(tensor_rule(index).name) +
           ".stride: beside lengths, must be those of bshd; NaN behind a length leaks into cuDNN's "
           "results otherwise";
  });
}

void require_band(Support& support, const Problem& p) {
  support.require(p.align != TESSERA_ALIGN_GIVEN, ReasonId::kFeature, Remedy::kNone, [&] {
    return "align=" + std::to_string(p.shift) + ": cuDNN's diagonals are top_left or bottom_right";
  });
  if (is_ragged(p)) return;
  const Sizes s = sizes_of(p);
  const BandRule band = band_rule_of<int64_t>(p);
  support.require(s.sq <= s.sk || (band.window.left < 0 && !band.bottom_right), ReasonId::kFeature,
                  Remedy::kNone, [&] {
                    return "sq=" + std::to_string(s.sq) +
                           ": must be at most sk with a left window or align=\"bottom_right\"";
                  });
}

// cuDNN's bottom-right diagonal and its left bound have no meaning without a right bound.
void require_right(Support& support, const Problem& p) {
  const BandRule band = band_rule_of<int64_t>(p);
  support.require(band.window.right >= 0 || band.window.left < 0 || !band.bottom_right,
                  ReasonId::kFeature, Remedy::kNone, [] {
                    return std::string(
                        "window=(left, None): with align=\"bottom_right\", must have a right side");
                  });
}

// Rows of the longest sequence of queries, as far as the host knows.
int64_t longest_q(const Problem& p) {
  if (!is_thd_q(p) || !has(p, TESSERA_MAX_SEQLEN_Q)) return sizes_of(p).sq;
  return std::max<int64_t>(p.max_seqlen_q, 1);
}

// cuDNN 9.19 writes too few lse for one query beside lengths: 4 of 16 on sm90 (hq=8, hk=2, two
// sequences), one for each key head of each sequence. Two queries and more are right.
void require_rows(Support& support, const Problem& p) {
  if (!is_ragged(p)) return;
  support.require(longest_q(p) > 1, ReasonId::kSize, Remedy::kNone, [&] {
    const char* name = is_thd_q(p) && has(p, TESSERA_MAX_SEQLEN_Q) ? "max_seqlen_q" : "sq";
    return std::string(name) +
           "=1: beside lengths, must be at least 2; cuDNN 9.19 leaves lse of heads unwritten";
  });
}

int64_t rounded_up(int64_t extent) {
  constexpr int64_t kStep = 512, kLargeStep = 32768;
  if (extent <= kStep) return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(extent)));
  const int64_t step = extent <= kLargeStep ? kStep : kLargeStep;
  return (extent + step - 1) / step * step;
}

// A tensor whose batch has no stride: offsets say where sequences begin.
void round_up(Tensor& t, bool packed, int64_t batch, int64_t rows) {
  t.extent[0] = batch;
  t.stride[0] = 0;
  if (packed) t.extent[1] = rows;
}

void strides_of(const Tensor& t, int64_t (&strides)[4]) {
  // A stride that is never used must still be a legal one.
  int64_t dense = t.extent[3];
  for (const int axis : {2, 1, 0}) {
    const int64_t stride = t.stride[axis];
    strides[axis == 2 ? 1 : axis == 1 ? 2 : 0] = stride > 0 ? stride : dense;
    dense = std::max(dense, stride > 0 ? stride : dense) * std::max<int64_t>(t.extent[axis], 1);
  }
  strides[3] = 1;
}

}  // namespace

bool is_ragged(const Problem& p) {
  return is_thd_q(p) || is_thd_k(p) || given(p, TESSERA_SEQLENS_Q) || given(p, TESSERA_SEQLENS_K);
}

Shape shape_of(const Problem& p) {
  const Sizes s = sizes_of(p);
  const BandRule band = band_rule_of<int64_t>(p);
  Shape shape{};
  shape.dtype = p.tensor[TESSERA_Q].dtype;
  shape.batch = p.tensor[TESSERA_Q].extent[0];
  shape.hq = s.hq;
  shape.hk = s.hk;
  shape.sq = p.tensor[TESSERA_Q].extent[1];
  shape.sk = p.tensor[TESSERA_K].extent[1];
  shape.dqk = s.dqk;
  shape.dv = s.dv;
  shape.ragged = is_ragged(p);
  shape.has_stats = given(p, TESSERA_LSE);
  strides_of(p.tensor[TESSERA_Q], shape.q);
  strides_of(p.tensor[TESSERA_K], shape.k);
  strides_of(p.tensor[TESSERA_V], shape.v);
  strides_of(p.tensor[TESSERA_O], shape.o);
  shape.backward = is_backward(p);
  if (shape.backward) {
    strides_of(p.tensor[TESSERA_DO], shape.grad_o);
    strides_of(p.tensor[TESSERA_DQ], shape.grad_q);
    strides_of(p.tensor[TESSERA_DK], shape.grad_k);
    strides_of(p.tensor[TESSERA_DV], shape.grad_v);
    if (p.max_seqlen_q > 0) shape.tokens_q = shape.sq, shape.sq = p.max_seqlen_q;
    if (p.max_seqlen_k > 0) shape.tokens_k = shape.sk, shape.sk = p.max_seqlen_k;
  }
  if (shape.ragged) {  // [tokens, hq], which lengths.cu turns
    const int64_t stats[] = {shape.sq * s.hq, 1, s.hq, 1};
    std::copy(std::begin(stats), std::end(stats), shape.stats);
  } else {
    const int64_t stats[] = {s.hq * shape.sq, shape.sq, 1, 1};
    std::copy(std::begin(stats), std::end(stats), shape.stats);
  }
  shape.bottom_right = band.bottom_right != 0 && band.hides();
  // A side that reaches further than any sequence hides nothing.
  constexpr int64_t kMostReach = 1 << 30;
  shape.left = std::min(band.window.left, kMostReach);
  shape.right = std::min(band.window.right, kMostReach);
  return shape;
}

Support CudnnRules::supports(const Problem& p, const Device& device) const {
  constexpr int kArchs[] = {80, 86, 87, 89, 90, 100, 103, 110, 120, 121};
  Support support;
  support.require(device.kind == TESSERA_CUDA, ReasonId::kDevice, Remedy::kNone,
                  [] { return std::string("device=cpu: must be a CUDA device"); });
  int arch = 0;
  if (device.kind == TESSERA_CUDA) {
    arch = traits_of(device).arch;
    const bool known = std::find(std::begin(kArchs), std::end(kArchs), arch) != std::end(kArchs);
    support.require(arch == 0 || known, ReasonId::kDevice, Remedy::kNone, [&] {
      return "arch=" + std::to_string(arch) + ": must be one of 80 to 121 that cuDNN 9.19 has";
    });
  }
  require_dtypes(support, p);
  require_sizes(support, p, arch);
  for (const int index : kTensors) {
    if (!given(p, index)) continue;
    require_strides(support, p, index);
    if (is_ragged(p)) require_packed_order(support, p, index);
  }
  require_features(support, p);
  if (is_backward(p)) require_backward(support, p, arch);
  require_band(support, p);
  require_right(support, p);
  require_rows(support, p);
  require_built(support, p);
  return support;
}

std::string CudnnRules::yields(const Problem& problem, const Device& device) const {
  const int arch = traits_of(device).arch;
  if (arch == 100 || arch == 103) return {};
  const std::string text = "arch=" + std::to_string(arch) + ": ";
  if (arch == 90) {
    return text + "cuda_sm90 is faster (" +
           (is_backward(problem) ? "1.18 to 1.65 times)" : "1.15 to 1.58 times)");
  }
  if (arch < 90) return text + "cuda_sm80 has every feature; cudnn runs by name";
  return text + "nobody has timed cuDNN on it; cudnn runs by name";
}

Problem CudnnRules::canonical(const Problem& problem) const {
  // What no graph depends on. A band stays, with all that says where it lies.
  constexpr uint32_t kElsewhere = TESSERA_SOFTMAX_SCALE | TESSERA_DETERMINISTIC |
                                  TESSERA_ALLOW_QUADRATIC | TESSERA_SAME_LENGTHS |
                                  TESSERA_MAX_SEQLEN_Q | TESSERA_MAX_SEQLEN_K | TESSERA_V_IN_K |
                                  TESSERA_PARTIAL;
  Problem p = problem;
  p.flags &= ~kElsewhere;
  p.format_q = p.format_kv = 0;
  p.max_seqlen_q = p.max_seqlen_k = 0;
  std::fill(std::begin(p.backend), std::end(p.backend), '\0');
  for (int index = 0; index < TESSERA_NUM_TENSORS; ++index) {
    const bool kept =
        std::find(std::begin(kTensors), std::end(kTensors), index) != std::end(kTensors);
    if (!kept) p.tensor[index] = {};
  }
  p.tensor[TESSERA_LSE].dtype = problem.tensor[TESSERA_LSE].dtype;
  if (!is_ragged(problem)) return p;
  const Sizes s = sizes_of(problem);
  const int64_t batch = rounded_up(s.batch);
  const bool max_k = has(problem, TESSERA_MAX_SEQLEN_K);
  int64_t rows = rounded_up(longest_q(problem));
  int64_t keys = rounded_up(max_k ? std::max<int64_t>(problem.max_seqlen_k, 1) : s.sk);
  if (is_backward(problem)) {  // whose workspace is as long as the tokens
    if (is_thd_q(problem)) p.max_seqlen_q = rows, rows = rounded_up(s.sq);
    if (is_thd_k(problem)) p.max_seqlen_k = keys, keys = rounded_up(s.sk);
  }
  for (const int index : {TESSERA_Q, TESSERA_O, TESSERA_DO, TESSERA_DQ}) {
    if (given(p, index)) round_up(p.tensor[index], is_thd_q(problem), batch, rows);
  }
  for (const int index : {TESSERA_K, TESSERA_V, TESSERA_DK, TESSERA_DV}) {
    if (given(p, index)) round_up(p.tensor[index], is_thd_k(problem), batch, keys);
  }
  p.tensor[TESSERA_SEQLENS_Q].dtype = TESSERA_INT32;  // says that it is ragged
  return p;
}

}  // namespace tessera::cuda::cudnn
