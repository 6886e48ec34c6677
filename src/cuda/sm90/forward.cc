// SPDX-License-Identifier: Apache-2.0
// The host side of the forward pass: tensor maps, the order of tiles, the launch.
#include <algorithm>
#include <atomic>
#include <climits>
#include <vector>

#include "cuda/common/checks.h"
#include "cuda/common/launch.h"
#include "cuda/common/merge.h"
#include "cuda/common/sequence.cuh"
#include "cuda/sm90/pack_mask.h"
#include "cuda/sm90/plan.h"
#include "cuda/sm90/segments.h"
#include "cuda/sm90/tensormap.h"

namespace tessera::cuda::sm90 {
namespace {

constexpr int kRowsOfConsumer = 64;
constexpr uint64_t kMark = 0x9e3779b97f4a7c15;  // a value that stray memory is unlikely to hold
// Heads that stand side by side in the order of tiles: as many as have the keys and values that a
// row sees in this much of the L2 (docs/kernels/sm90_forward_tried.md). Where CTAs ask for
// tiles long before they need them, few heads would keep too many of the long tiles in few hands.
constexpr int64_t kL2Bytes = 16 << 20, kL2BytesAskingEarly = 32 << 20;
constexpr int64_t kHeadsAskingEarly = 32;
constexpr int kConsumersOfLowTile = 2, kConsumersOfLoneTile = 1;

// What a problem needs of a kernel; of Feature. bias: the address of its elements, or null. The
// kernel of ALiBi alone divides slopes by the scale.
uint32_t features_of(const Problem& p, const void* bias, float scale) {
  constexpr float kLeastScale = 0x1p-60f;
  uint32_t features = 0;
  if (has(p, TESSERA_SOFTCAP)) features |= Feature::kSoftcap;
  if (has(p, TESSERA_DROPOUT)) features |= Feature::kDropout;
  if (given(p, TESSERA_ALIBI_SLOPES)) features |= Feature::kAlibi;
  if (given(p, TESSERA_BIAS)) features |= maps_bias(p, bias) ? Feature::kBiasTiles : Feature::kBias;
  for (const int index : {TESSERA_MASK, TESSERA_KEY_RANGES, TESSERA_SEGMENT_IDS_Q}) {
    if (given(p, index)) features |= Feature::kMasks;
  }
  const bool divides = features == Feature::kAlibi;
  return divides && !(scale >= kLeastScale) ? uint32_t{Feature::kEverything} : features;
}

class ForwardPlan final : public Plan {
 public:
  ForwardPlan(int multiprocessors, std::unique_ptr<Plan> fallback)
      : multiprocessors_(multiprocessors), fallback_(std::move(fallback)) {}

  int64_t workspace_bytes(const Problem& problem, int num_threads) const override {
    // Whether TMA can read a bias is known with its address.
    const void* const misaligned = reinterpret_cast<const void*>(1);
    const int64_t bytes = std::max(masks_bytes(problem, kernel_of(problem, nullptr, 1).tile),
                                   masks_bytes(problem, kernel_of(problem, misaligned, 1).tile));
    return std::max<int64_t>(sizeof(TileCounter) + bytes,
                             fallback_->workspace_bytes(problem, num_threads));
  }

  Status run(const Problem& problem, const Buffers& buffers, const Device& device) const override {
    if (!takes_call(problem, buffers)) return fallback_->run(problem, buffers, device);
    const DeviceScope scope(device.ordinal);
    TESSERA_RETURN_IF_ERROR(scope.status());
    const auto stream = static_cast<cudaStream_t>(buffers.stream);
    TESSERA_RETURN_IF_ERROR(report_checks(problem, buffers, stream));
    ForwardParams a = forward_params(problem, buffers);
    const Kernel& tall = kernel_of(problem, buffers.data[TESSERA_BIAS], a.problem.softmax_scale);
    const Kernel& kernel = with_rows(a.problem, tall);
    const int tile_n = kernel.tile.tile_n;
    TESSERA_RETURN_IF_ERROR(map_of(problem, buffers, TESSERA_Q, kRowsOfConsumer, false, &a.q));
    TESSERA_RETURN_IF_ERROR(map_of(problem, buffers, TESSERA_K, tile_n, false, &a.k));
    TESSERA_RETURN_IF_ERROR(map_of(problem, buffers, TESSERA_V, tile_n, a.ragged_v, &a.v));
    if (kernel.tile.o_by_tma) {
      TESSERA_RETURN_IF_ERROR(
          map_of(problem, buffers, TESSERA_O, kRowsOfConsumer, a.problem.thd_q, &a.o));
    }
    const int workers = multiprocessors_ * kernel.tile.ctas;
    order_tiles(kernel.tile.tile_m(), workers, buffers, a, true);
    if (given(problem, TESSERA_BIAS)) {
      TESSERA_RETURN_IF_ERROR(map_bias(problem, buffers, kernel, a));
    }
    auto* workspace = static_cast<char*>(buffers.workspace) + sizeof(TileCounter);
    if (given(problem, TESSERA_MASK)) {
      const Tensor& mask = problem.tensor[TESSERA_MASK];
      TESSERA_RETURN_IF_ERROR(pack_mask(mask, kernel.tile, workspace, a, stream));
      workspace += packed_mask_bytes(mask, kernel.tile);
    }
    if (given(problem, TESSERA_SEGMENT_IDS_Q)) {
      TESSERA_RETURN_IF_ERROR(find_segments(
          problem, kernel.tile, kernel.features == Feature::kMasks, workspace, a, stream));
    }
    TESSERA_RETURN_IF_ERROR(clear_max_logit(a, stream));
    return launch_overlapping("forward", kernel.function,
                              dim3(static_cast<unsigned>(std::min(a.tiles, workers))),
                              kernel.tile.threads(), kernel.shared_bytes, &a, stream);
  }

 private:
  static const Kernel& kernel_of(const Problem& problem, const void* bias, float scale) {
    const Sizes s = sizes_of(problem);
    return *find_kernel(features_of(problem, bias, scale), problem.tensor[TESSERA_Q].dtype, s.dqk,
                        s.dv);
  }

  static int64_t masks_bytes(const Problem& problem, const ForwardTile& tile) {
    int64_t bytes = 0;
    if (given(problem, TESSERA_MASK)) {
      bytes += packed_mask_bytes(problem.tensor[TESSERA_MASK], tile);
    }
    if (given(problem, TESSERA_SEGMENT_IDS_Q)) bytes += segment_bytes(problem, tile);
    return bytes;
  }

  // Up to how many keys a sequence under a diagonal counts as short. Measured at d64: lean kernels
  // in docs/kernels/sm90_forward_tried.md, those of a feature in sm90_features_tried.md there.
  static int most_keys_of_short(uint32_t features) {
    if (features == Feature::kAlibi) return 1024;
    if (features == Feature::kSoftcap) return 4096;
    return 2048;
  }

  static Status map_bias(const Problem& problem, const Buffers& buffers, const Kernel& kernel,
                         ForwardParams& a) {
    if (!(kernel.features & Feature::kBiasTiles) ||
        !maps_bias(problem, buffers.data[TESSERA_BIAS])) {
      return {};
    }
    const Tensor& bias = problem.tensor[TESSERA_BIAS];
    a.bias_in_tiles = true;
    a.bias_columns = static_cast<int>(bias.extent[3]);
    a.bias_factor_batch = bias.extent[0] > 1 && bias.stride[0] > 0;
    a.bias_factor_head = bias.extent[1] > 1 && bias.stride[1] > 0;
    return map_of_bias(problem, buffers, TESSERA_BIAS, kRowsOfConsumer, &a.bias);
  }

  // The row of the table with the same features and head dims and as many rows a tile as suit the
  // problem (docs/kernels/sm90_forward_tried.md, d64). Fewer waste less on the diagonal and
  // at the end of a sequence, and there are more tiles: 128 instead of 192 where tall ones leave
  // SMs idle, 64 for short sequences, if each of the three CTAs of an SM has a few.
  const Kernel& with_rows(const Params& p, const Kernel& tall) const {
    constexpr int kShortWithoutDiagonal = 512;  // keys of a sequence
    constexpr int kLoneTiles = 4;               // of a CTA
    const auto row = [&](int consumers) {
      const ForwardTile& tile = tall.tile;
      const Kernel* kernel = find_kernel(tall.features, tall.dtype, tile.dqk, tile.dv, consumers);
      return kernel && kernel->tile.dqk == tile.dqk && kernel->tile.dv == tile.dv ? kernel
                                                                                  : nullptr;
    };
    const auto tiles = [&](const Kernel& kernel) {
      return num_tile_slots(p.thd_q, p.sq, p.batch, kernel.tile.tile_m()) * p.hq;
    };
    const Kernel* const low = row(kConsumersOfLowTile);
    const Kernel* const lone = row(kConsumersOfLoneTile);
    const int keys = p.thd_k ? p.sk / p.batch : p.sk;
    const bool is_short = p.right >= 0 && keys <= most_keys_of_short(tall.features);
    if (lone && (is_short || keys <= kShortWithoutDiagonal) &&
        tiles(*lone) >= kLoneTiles * lone->tile.ctas * multiprocessors_) {
      return *lone;
    }
    return low && (is_short || tiles(tall) < multiprocessors_) ? *low : tall;
  }

  int multiprocessors_;
  std::unique_ptr<Plan> fallback_;
};

}  // namespace

const Kernel* find_kernel(uint32_t features, int dtype, int64_t dqk, int64_t dv,
                          int most_consumers) {
  const Kernel* best = nullptr;
  for (const Kernel& kernel : kernels()) {
    const ForwardTile& tile = kernel.tile;
    uint32_t missing = features & ~kernel.features;
    // Plain loads also read a bias that TMA could.
    if (kernel.features & Feature::kBias) missing &= ~uint32_t{Feature::kBiasTiles};
    if (missing || kernel.dtype != dtype || tile.dqk < dqk || tile.dv < dv) continue;
    if (tile.consumers > most_consumers) continue;
    if (!best || tile.dqk + tile.dv < best->tile.dqk + best->tile.dv) best = &kernel;
  }
  return best;
}

bool takes_call(const Problem& problem, const Buffers& buffers) {
  uintptr_t bits = 0;
  for (const int index : {TESSERA_Q, TESSERA_K, TESSERA_V, TESSERA_O}) {
    bits |= reinterpret_cast<uintptr_t>(buffers.data[index]);
  }
  return bits % 16 == 0 && !is_steep(softmax_scale_of(problem, buffers));
}

ForwardParams forward_params(const Problem& problem, const Buffers& buffers) {
  ForwardParams a{};
  a.problem = params_of(problem, buffers);
  a.ragged_v = given(problem, TESSERA_SEQLENS_K) || a.problem.thd_k;
  return a;
}

Status clear_max_logit(const ForwardParams& a, cudaStream_t stream) {
  const View& max_logit = a.problem.tensor[TESSERA_MAX_LOGIT];
  if (!max_logit.data) return {};
  return launch_fill(static_cast<float*>(max_logit.data), max_logit.stride[0], a.problem.hq,
                     -__builtin_huge_valf(), stream);
}

void order_tiles(int tile_m, int workers, const Buffers& buffers, ForwardParams& a,
                 bool asks_late) {
  const Params& p = a.problem;
  const int tiles_m = (p.sq + tile_m - 1) / tile_m;
  const int heads = p.batch * p.hq;
  a.tiles = num_tile_slots(p.thd_q, p.sq, p.batch, tile_m) * p.hq;
  a.longest_first = p.right >= 0;
  const int64_t bytes = asks_late ? kL2Bytes : kL2BytesAskingEarly;
  const int64_t keys = bytes * p.group / (int64_t{2} * (p.dqk + p.dv));
  a.keys_per_section = static_cast<int>(std::min<int64_t>(keys, INT_MAX));
  const bool is_window = asks_late && p.left >= 0 && p.right >= 0;
  const int64_t seen = std::min<int64_t>(p.sk, is_window ? int64_t{p.left} + p.right + 1 : p.sk);
  const int64_t most =
      std::min<int64_t>(std::max(keys / seen, asks_late ? 1 : kHeadsAskingEarly), heads);
  int per_section = static_cast<int>(most);
  while (heads % per_section != 0) --per_section;
  if (per_section * tiles_m < workers) {  // not a tile for each: rather too many heads than too few
    per_section = static_cast<int>(most);
    while (heads % per_section != 0) ++per_section;
  }
  a.tiles_m = Divisor::of(tiles_m);
  a.heads = Divisor::of(p.hq);
  a.heads_per_section = Divisor::of(per_section);
  a.per_section = Divisor::of(per_section * tiles_m);
  a.counter = a.tiles > workers ? static_cast<TileCounter*>(buffers.workspace) : nullptr;
  static std::atomic<uint64_t> launches{0};
  a.mark = kMark + launches.fetch_add(1, std::memory_order_relaxed);
}

Result<std::unique_ptr<Plan>> plan_forward(const Problem& canonical, const Device& device,
                                           std::unique_ptr<Plan> fallback) {
  const Sizes s = sizes_of(canonical);
  const int dtype = canonical.tensor[TESSERA_Q].dtype;
  const Result<DeviceInfo> info = device_info(device.ordinal);
  if (!info.ok()) return info.status();
  const DeviceScope scope(device.ordinal);
  TESSERA_RETURN_IF_ERROR(scope.status());
  constexpr uint32_t kSets[] = {0,
                                Feature::kAlibi,
                                Feature::kSoftcap,
                                Feature::kDropout,
                                Feature::kMasks,
                                Feature::kBiasTiles,
                                Feature::kEverything - Feature::kBias + Feature::kBiasTiles,
                                Feature::kEverything};
  std::vector<const Kernel*> used;
  for (const uint32_t features : kSets) {
    used.push_back(find_kernel(features, dtype, s.dqk, s.dv));
    used.push_back(find_kernel(features, dtype, s.dqk, s.dv, kConsumersOfLowTile));
    used.push_back(find_kernel(features, dtype, s.dqk, s.dv, kConsumersOfLoneTile));
  }
  for (const Kernel* kernel : used) {
    if (!kernel) continue;
    TESSERA_RETURN_IF_ERROR(cuda_status(
        cudaFuncSetAttribute(kernel->function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             kernel->shared_bytes),
        "cudaFuncSetAttribute"));
  }
  return std::unique_ptr<Plan>(
      std::make_unique<ForwardPlan>(info.value().multiprocessors, std::move(fallback)));
}

}  // namespace tessera::cuda::sm90
