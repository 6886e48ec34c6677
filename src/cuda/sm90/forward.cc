// SPDX-License-Identifier: Apache-2.0
// The host side of the forward pass: tensor maps, the order of tiles, the launch.
#include <algorithm>
#include <atomic>
#include <climits>

#include "cuda/common/checks.h"
#include "cuda/common/launch.h"
#include "cuda/common/merge.h"
#include "cuda/common/sequence.cuh"
#include "cuda/sm90/pack_mask.h"
#include "cuda/sm90/plan.h"
#include "cuda/sm90/tensormap.h"

namespace tessera::cuda::sm90 {
namespace {

constexpr int kRowsOfConsumer = 64;
constexpr uint64_t kMark = 0x9e3779b97f4a7c15;  // a value that stray memory is unlikely to hold
// Heads that stand side by side in the order of tiles: as many as have their keys and values in
// this much of the L2, and not fewer than kHeadsInFlight (docs/kernels/sm90_forward.md: the sweep).
constexpr int64_t kL2Bytes = 32 << 20;
constexpr int64_t kHeadsInFlight = 32;

// True when something beyond scale, band, lengths and sinks shapes the result.
bool is_rich(const Problem& p) {
  constexpr uint32_t kFlags = TESSERA_SOFTCAP | TESSERA_DROPOUT;
  if (has(p, kFlags)) return true;
  for (const int index : {TESSERA_BIAS, TESSERA_MASK, TESSERA_KEY_RANGES, TESSERA_SEGMENT_IDS_Q,
                          TESSERA_ALIBI_SLOPES}) {
    if (given(p, index)) return true;
  }
  return false;
}

class ForwardPlan final : public Plan {
 public:
  ForwardPlan(const Kernel& lean, const Kernel& rich, int multiprocessors,
              std::unique_ptr<Plan> fallback)
      : lean_(lean),
        rich_(rich),
        multiprocessors_(multiprocessors),
        fallback_(std::move(fallback)) {}

  int64_t workspace_bytes(const Problem& problem, int num_threads) const override {
    int64_t bytes = sizeof(TileCounter);
    if (given(problem, TESSERA_MASK)) {
      bytes += packed_mask_bytes(problem.tensor[TESSERA_MASK], rich_.tile);
    }
    return std::max(bytes, fallback_->workspace_bytes(problem, num_threads));
  }

  Status run(const Problem& problem, const Buffers& buffers, const Device& device) const override {
    if (!aligned(buffers)) return fallback_->run(problem, buffers, device);
    const DeviceScope scope(device.ordinal);
    TESSERA_RETURN_IF_ERROR(scope.status());
    const auto stream = static_cast<cudaStream_t>(buffers.stream);
    TESSERA_RETURN_IF_ERROR(report_checks(problem, buffers, stream));
    ForwardParams a{};
    a.problem = params_of(problem, buffers);
    a.ragged_v = given(problem, TESSERA_SEQLENS_K) || a.problem.thd_k;
    const Kernel& kernel = is_rich(problem) ? rich_ : lean_;
    const int tile_n = kernel.tile.tile_n;
    TESSERA_RETURN_IF_ERROR(map_of(problem, buffers, TESSERA_Q, kRowsOfConsumer, false, &a.q));
    TESSERA_RETURN_IF_ERROR(map_of(problem, buffers, TESSERA_K, tile_n, false, &a.k));
    TESSERA_RETURN_IF_ERROR(map_of(problem, buffers, TESSERA_V, tile_n, a.ragged_v, &a.v));
    order_tiles(kernel, buffers, a);
    if (given(problem, TESSERA_MASK)) {
      auto* packed = static_cast<char*>(buffers.workspace) + sizeof(TileCounter);
      TESSERA_RETURN_IF_ERROR(
          pack_mask(problem.tensor[TESSERA_MASK], kernel.tile, packed, a, stream));
    }
    if (const View& max_logit = a.problem.tensor[TESSERA_MAX_LOGIT]; max_logit.data) {
      TESSERA_RETURN_IF_ERROR(launch_fill(static_cast<float*>(max_logit.data), max_logit.stride[0],
                                          a.problem.hq, -__builtin_huge_valf(), stream));
    }
    return launch(kernel, a, stream);
  }

 private:
  // Strides are rules of support; addresses are only known now.
  static bool aligned(const Buffers& buffers) {
    uintptr_t bits = 0;
    for (const int index : {TESSERA_Q, TESSERA_K, TESSERA_V, TESSERA_O}) {
      bits |= reinterpret_cast<uintptr_t>(buffers.data[index]);
    }
    return bits % 16 == 0;
  }

  void order_tiles(const Kernel& kernel, const Buffers& buffers, ForwardParams& a) const {
    const Params& p = a.problem;
    const int tile_m = kernel.tile.tile_m();
    const int tiles_m = (p.sq + tile_m - 1) / tile_m;
    const int heads = p.batch * p.hq;
    a.tiles = num_tile_slots(p.thd_q, p.sq, p.batch, tile_m) * p.hq;
    a.longest_first = p.right >= 0;
    const int64_t keys = kL2Bytes * p.group / (int64_t{2} * (p.dqk + p.dv));
    a.keys_per_section = static_cast<int>(std::min<int64_t>(keys, INT_MAX));
    int per_section =
        static_cast<int>(std::min<int64_t>(std::max(keys / p.sk, kHeadsInFlight), heads));
    while (heads % per_section != 0) --per_section;
    a.tiles_m = Divisor::of(tiles_m);
    a.heads = Divisor::of(p.hq);
    a.heads_per_section = Divisor::of(per_section);
    a.per_section = Divisor::of(per_section * tiles_m);
    a.counter = a.tiles > multiprocessors_ ? static_cast<TileCounter*>(buffers.workspace) : nullptr;
    static std::atomic<uint64_t> launches{0};
    a.mark = kMark + launches.fetch_add(1, std::memory_order_relaxed);
  }

  Status launch(const Kernel& kernel, const ForwardParams& a, cudaStream_t stream) const {
    cudaLaunchAttribute overlap{};  // with the end of the kernel before (wait_for_predecessors)
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(std::min(a.tiles, multiprocessors_)));
    config.blockDim = dim3(static_cast<unsigned>(kernel.tile.threads()));
    config.dynamicSmemBytes = static_cast<size_t>(kernel.shared_bytes);
    config.stream = stream;
    config.attrs = &overlap;
    config.numAttrs = 1;
    void* arguments[] = {const_cast<ForwardParams*>(&a)};
    return cuda_status(cudaLaunchKernelExC(&config, kernel.function, arguments),
                       "cudaLaunchKernel (forward)");
  }

  const Kernel& lean_;
  const Kernel& rich_;
  int multiprocessors_;
  std::unique_ptr<Plan> fallback_;
};

}  // namespace

const Kernel* find_kernel(bool rich, int dtype, int64_t dqk, int64_t dv) {
  for (const Kernel& kernel : kernels()) {
    if (kernel.rich == rich && kernel.dtype == dtype && kernel.tile.dqk >= dqk &&
        kernel.tile.dv >= dv) {
      return &kernel;
    }
  }
  return nullptr;
}

Result<std::unique_ptr<Plan>> plan_forward(const Problem& canonical, const Device& device,
                                           std::unique_ptr<Plan> fallback) {
  const Sizes s = sizes_of(canonical);
  const int dtype = canonical.tensor[TESSERA_Q].dtype;
  const Kernel& lean = *find_kernel(false, dtype, s.dqk, s.dv);
  const Kernel& rich = *find_kernel(true, dtype, s.dqk, s.dv);
  const Result<DeviceInfo> info = device_info(device.ordinal);
  if (!info.ok()) return info.status();
  const DeviceScope scope(device.ordinal);
  TESSERA_RETURN_IF_ERROR(scope.status());
  for (const Kernel* kernel : {&lean, &rich}) {
    TESSERA_RETURN_IF_ERROR(cuda_status(
        cudaFuncSetAttribute(kernel->function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             kernel->shared_bytes),
        "cudaFuncSetAttribute"));
  }
  return std::unique_ptr<Plan>(
      std::make_unique<ForwardPlan>(lean, rich, info.value().multiprocessors, std::move(fallback)));
}

}  // namespace tessera::cuda::sm90
