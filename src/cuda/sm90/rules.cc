// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm90/rules.h"

#include <algorithm>
#include <cstdlib>
#include <string>

#include "core/choose/unbuilt.h"
#include "core/mask/sequence.h"
#include "cuda/common/rules/arguments.h"
#include "cuda/sm90/backward/choice.h"
#include "cuda/sm90/bias/problem.h"
#include "cuda/sm90/dbias/choice.h"
#include "cuda/sm90/decode/choice.h"
#include "cuda/sm90/forward/choice.h"
#include "cuda/sm90/fp8/choice.h"
#include "cuda/sm90/kernels.h"
#include "cuda/sm90/machine/readable.h"
#include "cuda/sm90/mla/choice.h"

namespace tessera::cuda::sm90 {
namespace {

constexpr int kHopper = 90;
constexpr int kUnit = 16;                 // bytes of TMA's accesses, and of ours
constexpr int64_t kMostExtent = 1 << 24;  // room in 32 bits for sums and products of positions

// Tensors in the dtype of q that are read or written in units of 16 bytes.
constexpr int kTensors[] = {TESSERA_Q,  TESSERA_K,  TESSERA_V,  TESSERA_O,
                            TESSERA_DO, TESSERA_DQ, TESSERA_DK, TESSERA_DV};

bool shapes_scores(const Problem& p) { return (features_of(p) & kEverything) != kLean; }

// How many elements make the 16 bytes in which TMA and the kernels read and write.
int64_t elements_of_unit(int dtype) { return is_fp8(dtype) ? 16 : 8; }

void require_dtypes(Support& support, const Problem& p) {
  const int q = p.tensor[TESSERA_Q].dtype;
  support.require(q == TESSERA_BF16 || q == TESSERA_FP16, ReasonId::kDtype, Remedy::kUseBf16, [&] {
    return "q.dtype=" + std::string(dtype_name(q)) + ": must be bf16, fp16 or e4m3";
  });
  for (const int index : kTensors) {
    const bool is_cache = index == TESSERA_K || index == TESSERA_V;
    if (!given(p, index) || (is_cache && (runs_in_decode(p) || runs_in_mla(p) || reads_pages(p))))
      continue;
    const int dtype = p.tensor[index].dtype;
    support.require(dtype == q, ReasonId::kDtype, Remedy::kUseBf16, [&] {
      return std::string(tensor_rule(index).name) + ".dtype=" + std::string(dtype_name(dtype)) +
             ": must be that of q";
    });
  }
}

void require_sizes(Support& support, const Problem& p) {
  const Sizes s = sizes_of(p);
  const auto text = [](const char* name, int64_t value, const char* rule) {
    return std::string(name) + "=" + std::to_string(value) + ": " + rule;
  };
  const int dtype = p.tensor[TESSERA_Q].dtype;
  const int64_t elements = elements_of_unit(dtype);
  for (const auto& [name, dim] : {std::pair{"head_dim_qk", s.dqk}, {"head_dim_v", s.dv}}) {
    support.require(dim % elements == 0, ReasonId::kHeadDim, Remedy::kNone,
                    [&, name = name, dim = dim] {
                      return text(name, dim, "must be a multiple of ") + std::to_string(elements);
                    });
  }
  const bool wide =
      is_wide(s) && !is_backward(p) && !multiplies_fp8(p);  // require_fp8() has a rule
  const bool fits = wide ? find_wide_kernel(dtype, s.dqk, s.dv) != nullptr
                         : find_forward_kernel({kLean}, dtype, s.dqk, s.dv) != nullptr;
  support.require(fits || !is_16bit(dtype), ReasonId::kHeadDim, Remedy::kNone, [&] {
    return text("head_dim_qk", s.dqk,
                wide ? "must be at most 576, and head_dim_v at most 512"
                     : "and head_dim_v must be at most 256");
  });
  support.require(!wide || !shapes_scores(p), ReasonId::kHeadDim, Remedy::kNone, [&] {
    return text("head_dim_qk", s.dqk,
                "and head_dim_v must be at most 256 with a mask, bias, softcap or dropout");
  });
  for (const auto& [name, extent] : {std::pair{"batch", s.batch}, {"sq", s.sq}, {"sk", s.sk}}) {
    support.require(
        extent > 0 && extent <= kMostExtent, ReasonId::kSize, Remedy::kNone,
        [&, name = name, extent = extent] { return text(name, extent, "must be in [1, 2^24]"); });
  }
  require_tiles(support, p);
  support.require(std::abs(p.shift) <= kMostExtent, ReasonId::kSize, Remedy::kNone,
                  [&] { return text("align", p.shift, "must be in [-2^24, 2^24]"); });
  constexpr int64_t kMostHeads = 65535;  // of a grid's y and z
  support.require(s.hq <= kMostHeads, ReasonId::kSize, Remedy::kNone,
                  [&] { return text("num_heads_q", s.hq, "must be at most 65535"); });
}

// TMA counts in 16 bytes and does not repeat rows.
void require_strides(Support& support, const Problem& p, int index) {
  const Tensor& t = p.tensor[index];
  const int64_t elements = elements_of_unit(t.dtype);
  for (int axis = 0; axis < 3; ++axis) {
    if (t.extent[axis] <= 1) continue;
    const int64_t stride = t.stride[axis];
    support.require(stride > 0 && stride % elements == 0 && stride < kMostStride, ReasonId::kLayout,
                    Remedy::kNone, [&] {
                      return std::string(tensor_rule(index).name) + ".stride[" +
                             std::to_string(axis) + "]=" + std::to_string(stride) +
                             ": must be a positive multiple of " + std::to_string(elements) +
                             " elements";
                    });
  }
}

void require_features(Support& support, const Problem& p) {
  for (const int index : {TESSERA_PAGE_TABLE_K, TESSERA_K_SCALE, TESSERA_V_SCALE}) {
    const bool ok = multiplies_fp8(p) || runs_in_decode(p) || runs_in_mla(p) || reads_pages(p);
    support.require(!given(p, index) || ok, ReasonId::kFeature, Remedy::kNone, [&] {
      return std::string(tensor_rule(index).name) + ": the Hopper kernels do not have it";
    });
  }
  support.require(!has(p, TESSERA_ACCUMULATE), ReasonId::kFeature, Remedy::kNone, [] {
    return std::string("accumulate=True: the Hopper kernels do not have it; cuda_sm80 does");
  });
  // A mask of keys alone promises that NaN in the v it hides does no harm; this kernel multiplies
  // it by 0.
  const Tensor& mask = p.tensor[TESSERA_MASK];
  support.require(!given(p, TESSERA_MASK) || (mask.extent[2] > 1 && mask.extent[3] > 1),
                  ReasonId::kFeature, Remedy::kNone, [&] {
                    return "mask.shape=" + shape_text(p, TESSERA_MASK) +
                           ": must have more than one query and more than one key";
                  });
}

// Why this backend does not compute the gradients of precision="fp8" of a problem.
void require_rounded_backward(Support& support, const Problem& p) {
  for (int index = TESSERA_AMAX_O; index <= TESSERA_AMAX_DV; ++index) {
    support.require(!given(p, index), ReasonId::kFeature, Remedy::kNone, [&] {
      return std::string(tensor_rule(index).name) +
             ": the Hopper kernels do not have it in the backward pass; cuda_sm80 does";
    });
  }
  support.require(has_rounded_backward(p), ReasonId::kFeature, Remedy::kNone, [&] {
    const Sizes s = sizes_of(p);
    return "head_dim_qk=" + std::to_string(s.dqk) + ", head_dim_v=" + std::to_string(s.dv) +
           ": the Hopper kernels make gradients with products in fp8 for head dims up to 128, "
           "without a mask, bias, softcap, dropout or a fixed order of sums; cuda_sm80 has all of "
           "it";
  });
}

// Positions are the diagonal of a sequence here. What counts rows and keys from them as well is
// not.
void require_no_origin(Support& support, const Problem& p) {
  for (const int index : {TESSERA_Q_START, TESSERA_K_START}) {
    const char* by = counted_from(p, index);
    support.require(!by, ReasonId::kFeature, Remedy::kNone, [&] {
      return std::string(tensor_rule(index).name) + ".shape=" + shape_text(p, index) + ": beside " +
             by + ", the Hopper kernels do not have it; cuda_sm80 does";
    });
  }
}

// Few queries live on loads: cuda_sm80 packs the heads of a group, so that a CTA reads keys once for
// all of them. Here tiles without features do so with four heads and more (b=8 hq=64 hk=8, 8 queries
// on 8k keys of d=128 on an H200: 79 us here, 136 there). With two they gain from nine queries on,
// or where there is little to pack. A cache of E4M3 is converted for each tile here; there for up to
// 64 rows of a group at once (8 x 16 queries of 32 heads on 8, 8k keys: 615 us here, 143 there).
std::string yields_few_queries(const Problem& p) {
  constexpr int64_t kDecodeQueries = 16, kDecodeQueriesOfPairs = 8, kFewUnits = 4;
  constexpr int64_t kRowsOfCache = 64;
  constexpr int kHeadsThatReadOnce = 4;
  const Sizes s = sizes_of(p);
  const int64_t queries = most_queries(p);
  const bool is_lean = !shapes_scores(p) && !has(p, TESSERA_BATCH_INVARIANT);
  if (is_lean && heads_that_share_keys(p) >= kHeadsThatReadOnce) return {};
  const bool has_pairs = is_lean && s.group() % 2 == 0;
  const bool is_fp8_cache = is_fp8(p.tensor[TESSERA_K].dtype);
  const int64_t most = is_fp8_cache ? kRowsOfCache / s.group()
                       : has_pairs  ? kDecodeQueriesOfPairs
                                    : kDecodeQueries;
  if (queries > most || (has_pairs && !is_fp8_cache && s.batch * s.hk < kFewUnits)) return {};
  return "sq=" + std::to_string(queries) + ": cuda_sm80 decodes up to " + std::to_string(most) +
         " queries faster";
}

void append(std::string& names, const char* name) {
  if (names.find(name) == std::string::npos)
    names += (names.empty() ? "" : ", ") + std::string(name);
}

std::string forward_names(const Problem& problem, int multiprocessors) {
  const Buffers nominal = nominal_buffers(problem);
  const Params p = params_of(problem, nominal);
  const Sizes s = sizes_of(problem);
  if (multiplies_fp8(problem)) return fp8_kernel_of(problem, multiprocessors).name;
  if (runs_in_mla(problem)) return mla_kernel_of(problem).name;
  if (runs_in_decode(problem)) return decode_kernel_of(problem).name;
  if (is_wide(s)) {
    const WideKernel& kernel = *find_wide_kernel(problem.tensor[TESSERA_Q].dtype, s.dqk, s.dv);
    const bool alone = runs_alone(p, multiprocessors / kernel.tile.ctas);
    return alone ? low_kernel_of(kernel, problem).name : kernel.name;
  }
  const ForwardKernel& tall = tall_kernel_of(problem, nominal.data[TESSERA_BIAS], p.softmax_scale);
  std::string names = with_rows(p, tall, multiprocessors).name;
  const DecodeKernel* const steps = reads_pages(problem) ? kernel_of_steps(problem) : nullptr;
  if (steps) append(names, steps->name);
  return names;
}

std::string backward_names(const Problem& problem, int multiprocessors) {
  if (is_rounded(problem)) return rounded_backward_kernel(problem).name;
  if (const ApartKernels* kernels = choose_apart_kernels(problem, multiprocessors)) {
    return kernels->name;
  }
  const BackwardKernel& kernel = choose_backward_kernel(problem);
  std::string names = kernel.name;
  if (kernel.tile.sums_dbias) return names;
  const Buffers nominal = nominal_buffers(problem);
  const Params p = params_of(problem, nominal);
  for (const auto& [gradient, of] : kGradients) {
    if (!p.tensor[gradient].data) continue;
    append(names, dbias_kernel_of(problem, p, gradient, nominal.data[TESSERA_BIAS]).name);
  }
  return names;
}

}  // namespace

Support Sm90Rules::supports(const Problem& p, const Device& device) const {
  Support support;
  support.require(device.kind == TESSERA_CUDA, ReasonId::kDevice, Remedy::kNone,
                  [] { return std::string("device=cpu: must be a CUDA device"); });
  if (device.kind == TESSERA_CUDA) {
    const int arch = traits_of(device).arch;
    support.require(arch == 0 || arch == kHopper, ReasonId::kDevice, Remedy::kNone,
                    [&] { return "arch=" + std::to_string(arch) + ": must be 90 (Hopper)"; });
  }
  if (is_backward(p)) require_backward(support, p);
  if (is_rounded(p) && is_backward(p)) {
    require_dtypes(support, p);
    require_rounded_backward(support, p);
  } else if (multiplies_fp8(p)) {
    require_fp8(support, p);
  } else {
    require_dtypes(support, p);
  }
  require_sizes(support, p);
  for (const int index : kTensors) {
    if (!given(p, index)) continue;
    if (is_rounded(p) && !is_backward(p) && index != TESSERA_O) continue;  // copies are aligned
    require_strides(support, p, index);
  }
  require_features(support, p);
  require_built(support, p, Fp8Inputs::kRounded);
  require_no_origin(support, p);
  return support;
}

std::string Sm90Rules::yields(const Problem& p, const Device&) const {
  if (is_backward(p) || multiplies_fp8(p) || runs_in_mla(p) || runs_in_decode(p)) return {};
  return yields_few_queries(p);
}

// Answers for a call whose tensors TMA can address (machine/readable.h), as far as addresses tell;
// others run in kernels of cuda_sm80.
std::string Sm90Rules::kernels_for(const Problem& problem, const Device& device) const {
  const int multiprocessors = traits_of(device).multiprocessors;
  const Problem p = with_padded_bias(problem);
  return is_backward(p) ? backward_names(p, multiprocessors) : forward_names(p, multiprocessors);
}

std::vector<const char*> Sm90Rules::kernel_names() const {
  std::vector<const char*> names;
  const auto add = [&](const auto& table) {
    for (const auto& kernel : table) names.push_back(kernel.name);
  };
  add(forward_kernels());
  add(fp8_kernels());
  add(mla_kernels());
  add(decode_kernels());
  add(wide_kernels());
  add(backward_kernels());
  add(apart_kernels());
  add(dbias_kernels());
  return names;
}

}  // namespace tessera::cuda::sm90
