// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm90/backend.h"

#include <algorithm>
#include <iterator>
#include <string>

#include "cuda/common/general.h"
#include "cuda/common/launch.h"
#include "cuda/sm90/plan.h"
#include "cuda/sm90/tensormap.h"

namespace tessera::cuda::sm90 {
namespace {

constexpr int kHopper = 90;
constexpr int kElementsOf16Bytes = 8;

// In the dtype of q and read or written in units of 16 bytes.
constexpr int kTensors[] = {TESSERA_Q,  TESSERA_K,  TESSERA_V,  TESSERA_O,
                            TESSERA_DO, TESSERA_DQ, TESSERA_DK, TESSERA_DV};

// Shape or hide scores.
constexpr int kScoreTensors[] = {TESSERA_MASK, TESSERA_KEY_RANGES, TESSERA_SEGMENT_IDS_Q,
                                 TESSERA_BIAS, TESSERA_ALIBI_SLOPES};

class Sm90Backend final : public Backend {
 public:
  std::string_view name() const override { return "cuda_sm90"; }
  std::string unavailable() const override { return driver_unavailable(); }

  Support supports(const Problem& p, const Device& device) const override {
    Support support;
    support.require(device.kind == TESSERA_CUDA, ReasonId::kDevice, Remedy::kNone,
                    [] { return std::string("device=cpu: must be a CUDA device"); });
    if (device.kind == TESSERA_CUDA) {
      const int arch = arch_of(device);
      support.require(arch == 0 || arch == kHopper, ReasonId::kDevice, Remedy::kNone,
                      [&] { return "arch=" + std::to_string(arch) + ": must be 90 (Hopper)"; });
    }
    if (is_backward(p)) {
      require_backward(support, p);
    } else {
      require_queries(support, p);
      require_tiles(support, p);
    }
    require_dtypes(support, p);
    require_sizes(support, p);
    for (const int index : kTensors) {
      if (given(p, index)) require_strides(support, p, index);
    }
    require_features(support, p);
    return support;
  }

  // What the fallback needs is all that a plan of this room depends on.
  Problem canonical(const Problem& problem) const override {
    return general_backend().canonical(problem);
  }

  Result<std::unique_ptr<Plan>> plan(const Problem& canonical,
                                     const Device& device) const override {
    auto fallback = general_backend().plan(canonical, device);
    if (!fallback.ok()) return fallback;
    auto plan = is_backward(canonical)         ? plan_backward
                : is_wide(sizes_of(canonical)) ? plan_wide_forward
                                               : plan_forward;
    return plan(canonical, device, std::move(fallback).value());
  }

  std::string description_json() const override {
    return "{\"kernels\": " + std::to_string(kernels().size() + wide_kernels().size()) + "}";
  }

 private:
  static void require_dtypes(Support& support, const Problem& p) {
    const int q = p.tensor[TESSERA_Q].dtype;
    support.require(
        q == TESSERA_BF16 || q == TESSERA_FP16, ReasonId::kDtype, Remedy::kUseBf16,
        [&] { return "q.dtype=" + std::string(dtype_name(q)) + ": must be bf16 or fp16"; });
    for (const int index : kTensors) {
      if (!given(p, index)) continue;
      const int dtype = p.tensor[index].dtype;
      support.require(dtype == q, ReasonId::kDtype, Remedy::kUseBf16, [&] {
        return std::string(tensor_rule(index).name) + ".dtype=" + std::string(dtype_name(dtype)) +
               ": must be that of q";
      });
    }
  }

  static void require_sizes(Support& support, const Problem& p) {
    const Sizes s = sizes_of(p);
    const auto text = [](const char* name, int64_t value, const char* rule) {
      return std::string(name) + "=" + std::to_string(value) + ": " + rule;
    };
    for (const auto& [name, dim] : {std::pair{"head_dim_qk", s.dqk}, {"head_dim_v", s.dv}}) {
      support.require(dim % kElementsOf16Bytes == 0, ReasonId::kHeadDim, Remedy::kNone,
                      [&] { return text(name, dim, "must be a multiple of 8"); });
    }
    const int dtype = p.tensor[TESSERA_Q].dtype;
    const bool wide = is_wide(s) && !is_backward(p);
    const bool fits = wide ? find_wide_kernel(dtype, s.dqk, s.dv) != nullptr
                           : find_kernel(0, dtype, s.dqk, s.dv) != nullptr;
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
      support.require(extent > 0 && extent <= kRagged, ReasonId::kSize, Remedy::kNone,
                      [&] { return text(name, extent, "must be in [1, 2^24]"); });
    }
    constexpr int64_t kMostHeads = 65535;  // of a grid's y and z
    support.require(s.hq <= kMostHeads, ReasonId::kSize, Remedy::kNone,
                    [&] { return text("num_heads_q", s.hq, "must be at most 65535"); });
  }

  // Few queries live on loads: a CTA here owns rows of one head and reads the keys for them alone,
  // where cuda_sm80 packs the heads of a group and splits the keys (b=64 hq=32 hk=4, one query, 8k
  // keys of d=128 on an H200: 1.47 ms here, 0.27 ms there).
  static void require_queries(Support& support, const Problem& p) {
    constexpr int64_t kDecodeQueries = 16;
    const int64_t queries = most_queries(p);
    support.require(queries > kDecodeQueries, ReasonId::kSize, Remedy::kNone, [&] {
      return "sq=" + std::to_string(queries) + ": must be more than " +
             std::to_string(kDecodeQueries) + "; cuda_sm80 decodes faster";
    });
  }

  // Few row tiles and many keys: a tile's keys are one CTA's work here and most multiprocessors
  // idle, where cuda_sm80 splits them (docs/kernels/sm90_forward.md has the crossover). Measured
  // without features; batch-invariant problems must not depend on the number of tiles, nor are
  // they split.
  static void require_tiles(Support& support, const Problem& p) {
    constexpr int64_t kFewTiles = 32, kRows = 128, kManyKeys = 8192, kMostHeadDim = 128;
    const Sizes s = sizes_of(p);
    const bool splits = !has(p, TESSERA_BATCH_INVARIANT) && !shapes_scores(p) && !is_thd_k(p) &&
                        !(has(p, TESSERA_WINDOW) && p.window_left >= 0) &&
                        std::max(s.dqk, s.dv) <= kMostHeadDim;
    const int64_t tiles = (most_queries(p) + kRows - 1) / kRows * s.hq * s.batch;
    support.require(
        !splits || tiles > kFewTiles || s.sk < kManyKeys, ReasonId::kSize, Remedy::kNone, [&] {
          return "sk=" + std::to_string(s.sk) + ": must be less than " + std::to_string(kManyKeys) +
                 " where batch, heads and queries make " + std::to_string(tiles) +
                 " tiles of 128 rows; cuda_sm80 splits the keys and is faster";
        });
  }

  static bool shapes_scores(const Problem& p) {
    return has(p, TESSERA_SOFTCAP | TESSERA_DROPOUT) ||
           std::any_of(std::begin(kScoreTensors), std::end(kScoreTensors),
                       [&](int index) { return given(p, index); });
  }

  static int64_t most_queries(const Problem& p) {
    const int64_t queries = sizes_of(p).sq;
    return has(p, TESSERA_MAX_SEQLEN_Q) ? std::min(queries, p.max_seqlen_q) : queries;
  }

  // TMA counts in 16 bytes and does not repeat rows.
  static void require_strides(Support& support, const Problem& p, int index) {
    const Tensor& t = p.tensor[index];
    for (int axis = 0; axis < 3; ++axis) {
      if (t.extent[axis] <= 1) continue;
      const int64_t stride = t.stride[axis];
      support.require(stride > 0 && stride % kElementsOf16Bytes == 0 && stride < kMostStride,
                      ReasonId::kLayout, Remedy::kNone, [&] {
                        return std::string(tensor_rule(index).name) + ".stride[" +
                               std::to_string(axis) + "]=" + std::to_string(stride) +
                               ": must be a positive multiple of 8 elements";
                      });
    }
  }

  static void require_features(Support& support, const Problem& p) {
    for (const int index : {TESSERA_PAGE_TABLE_K, TESSERA_K_SCALE, TESSERA_V_SCALE}) {
      support.require(!given(p, index), ReasonId::kFeature, Remedy::kNone, [&] {
        return std::string(tensor_rule(index).name) + ": the Hopper kernels do not have it";
      });
    }
    // A mask of keys alone promises that NaN in the v it hides does no harm; this kernel multiplies
    // it by 0.
    const Tensor& mask = p.tensor[TESSERA_MASK];
    support.require(!given(p, TESSERA_MASK) || (mask.extent[2] > 1 && mask.extent[3] > 1),
                    ReasonId::kFeature, Remedy::kNone, [&] {
                      return "mask.shape=" + shape_text(p, TESSERA_MASK) +
                             ": must have more than one query and more than one key";
                    });
  }
};

}  // namespace

const Backend& backend() {
  static const Sm90Backend instance;
  return instance;
}

}  // namespace tessera::cuda::sm90
