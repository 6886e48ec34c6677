// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm90/fp8/choice.h"

#include <algorithm>
#include <string>
#include <tuple>

#include "core/mask/sequence.h"
#include "core/problem/dtype.h"
#include "cuda/common/features.h"
#include "cuda/common/params.h"
#include "cuda/sm90/fp8/keys.h"

namespace tessera::cuda::sm90 {
namespace {

constexpr int64_t kMostKeys = 1 << 30;  // of V^T

void require_dtype(Support& support, const Problem& p, int index, bool ok, const char* rule) {
  support.require(ok, ReasonId::kDtype, Remedy::kNone, [&] {
    return std::string(tensor_rule(index).name) +
           ".dtype=" + std::string(dtype_name(p.tensor[index].dtype)) + ": " + rule;
  });
}

void refuse_tensor(Support& support, const Problem& p, int index, bool ok, const char* rule) {
  support.require(ok, ReasonId::kFeature, Remedy::kNone, [&] {
    return std::string(tensor_rule(index).name) + ".shape=" + shape_text(p, index) + ": " + rule;
  });
}

}  // namespace

bool is_of_fp8(const Problem& problem) { return is_fp8(problem.tensor[TESSERA_Q].dtype); }

const Fp8Kernel* find_fp8_kernel(const Fp8Needs& needs, int64_t dqk, int64_t dv,
                                 int most_consumers) {
  const Fp8Kernel* best = nullptr;
  for (const Fp8Kernel& kernel : fp8_kernels()) {
    const Fp8Tile& tile = kernel.tile;
    if (kernel.dtype != needs.dtype_of_o || tile.exact_sum < needs.exact_sum) continue;
    if (tile.by_blocks != needs.by_blocks || tile.consumers > most_consumers) continue;
    if (tile.dqk < dqk || tile.dv < dv) continue;
    const auto order = [](const Fp8Tile& t) {
      return std::tuple(t.dqk + t.dv, t.exact_sum, -t.consumers);  // least head dims first
    };
    if (!best || order(tile) < order(best->tile)) best = &kernel;
  }
  return best;
}

const Fp8Kernel& fp8_kernel_of(const Problem& problem, int multiprocessors) {
  constexpr int64_t kMostKeysOfShort = 2048;
  constexpr int kConsumersOfLowTile = 2;
  const Sizes s = sizes_of(problem);
  const Fp8Needs needs{problem.tensor[TESSERA_O].dtype, given(problem, TESSERA_LSE),
                       is_rounded(problem)};
  const bool packed = is_thd_k(problem);
  const Fp8Kernel& tall = *find_fp8_kernel(needs, s.dqk, s.dv);
  const int64_t keys = packed ? s.sk / std::max<int64_t>(s.batch, 1) : s.sk;
  const bool has_diagonal = band_rule_of<int64_t>(problem).window.right >= 0;
  const int64_t tiles = num_tile_slots(is_thd_q(problem), static_cast<int>(s.sq),
                                       static_cast<int>(s.batch), tall.tile.tile_m()) *
                        s.hq;
  const bool low = (has_diagonal && keys <= kMostKeysOfShort) || tiles < multiprocessors;
  const Fp8Kernel* kernel = low ? find_fp8_kernel(needs, s.dqk, s.dv, kConsumersOfLowTile) : &tall;
  return kernel && kernel->tile.dqk == tall.tile.dqk ? *kernel : tall;
}

void require_fp8(Support& support, const Problem& p) {
  constexpr const char* kPlain = "the fp8 kernels of Hopper do not have it; cuda_sm80 does";
  support.require(!is_backward(p), ReasonId::kFeature, Remedy::kNone, [] {
    return std::string(
        "the backward pass of fp8: the Hopper kernels do not have it; cuda_sm80 "
        "does");
  });
  if (!is_rounded(p)) {
    for (const int index : {TESSERA_Q, TESSERA_K, TESSERA_V}) {
      require_dtype(support, p, index, p.tensor[index].dtype == TESSERA_E4M3, "must be e4m3");
    }
  }
  require_dtype(support, p, TESSERA_O, is_16bit(p.tensor[TESSERA_O].dtype),
                "must be bf16 or fp16 beside products in fp8");
  const Sizes s = sizes_of(p);
  const bool fits = find_fp8_kernel({TESSERA_BF16, false, is_rounded(p)}, s.dqk, s.dv) != nullptr;
  support.require(fits, ReasonId::kHeadDim, Remedy::kNone, [&] {
    return "head_dim_qk=" + std::to_string(s.dqk) + ", head_dim_v=" + std::to_string(s.dv) +
           ": must be at most 192 and 128 in fp8";
  });
  support.require(!(kMostKeys < transposed_keys(is_thd_k(p), s.sk, s.batch)), ReasonId::kSize,
                  Remedy::kNone, [&] {
                    return "batch=" + std::to_string(s.batch) +
                           ": must be at most 2^22 where keys are packed";
                  });
  support.require((features_of(p) & kEverything) == kLean, ReasonId::kFeature, Remedy::kNone, [] {
    return std::string("a mask, bias, softcap or dropout beside products in fp8: ") + kPlain;
  });
  for (const int index : {TESSERA_K_SCALE, TESSERA_V_SCALE}) {
    refuse_tensor(support, p, index, p.tensor[index].extent[2] <= 1,
                  "must be one scale a head; cuda_sm80 takes blocks of keys");
  }
  for (const int index : {TESSERA_PAGE_TABLE_K, TESSERA_O_SCALE}) {
    refuse_tensor(support, p, index, !given(p, index), kPlain);
  }
}

}  // namespace tessera::cuda::sm90
