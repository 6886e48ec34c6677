// SPDX-License-Identifier: Apache-2.0
// The host side of the forward pass for wide heads.
#include <algorithm>

#include "cuda/common/checks.h"
#include "cuda/common/launch.h"
#include "cuda/sm90/machine/tensormap.h"
#include "cuda/sm90/plan.h"

namespace tessera::cuda::sm90 {
namespace {

// A kernel and how many of its clusters run at a time.
struct Choice {
  const WideKernel* kernel;
  int clusters;
};

Result<Choice> prepare(const WideKernel& kernel) {
  TESSERA_RETURN_IF_ERROR(cuda_status(
      cudaFuncSetAttribute(kernel.code->function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           kernel.code->shared_bytes),
      "cudaFuncSetAttribute"));
  const auto ctas = static_cast<unsigned>(kernel.tile.ctas);
  cudaLaunchAttribute in_clusters{};
  in_clusters.id = cudaLaunchAttributeClusterDimension;
  in_clusters.val.clusterDim = {ctas, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(ctas);
  config.blockDim = dim3(WideTile::kThreads);
  config.dynamicSmemBytes = static_cast<size_t>(kernel.code->shared_bytes);
  config.attrs = &in_clusters;
  config.numAttrs = 1;
  int clusters = 0;
  TESSERA_RETURN_IF_ERROR(
      cuda_status(cudaOccupancyMaxActiveClusters(&clusters, kernel.code->function, &config),
                  "cudaOccupancyMaxActiveClusters"));
  if (clusters < 1) return failed("cudaOccupancyMaxActiveClusters: no cluster fits");
  return Choice{&kernel, clusters};
}

class WidePlan final : public Plan {
 public:
  // alone: for sequences of no more queries than a CTA has; may be `clustered`.
  WidePlan(const Choice& clustered, const Choice& alone, std::unique_ptr<Plan> fallback)
      : clustered_(clustered), alone_(alone), fallback_(std::move(fallback)) {}

  int64_t workspace_bytes(const Problem& problem, int num_threads) const override {
    return std::max<int64_t>(sizeof(TileCounter), fallback_->workspace_bytes(problem, num_threads));
  }

  Status run(const Problem& problem, const Buffers& buffers, const Device& device) const override {
    if (!takes_call(problem, buffers)) return fallback_->run(problem, buffers, device);
    const DeviceScope scope(device.ordinal);
    TESSERA_RETURN_IF_ERROR(scope.status());
    const auto stream = static_cast<cudaStream_t>(buffers.stream);
    TESSERA_RETURN_IF_ERROR(report_checks(problem, buffers, stream));
    ForwardParams a = forward_params(problem, buffers);
    Choice choice = runs_alone(a.problem, clustered_.clusters) ? alone_ : clustered_;
    const WideKernel& kernel = *choice.kernel;
    const int ctas = kernel.tile.ctas;
    choice.clusters = std::max(multiprocessors_for(buffers, choice.clusters * ctas) / ctas, 1);
    TESSERA_RETURN_IF_ERROR(map_of(problem, buffers, TESSERA_Q, WideTile::kRows, 0, &a.q));
    TESSERA_RETURN_IF_ERROR(map_of(problem, buffers, TESSERA_K, WideTile::kKeys, 0, &a.k));
    TESSERA_RETURN_IF_ERROR(
        map_of(problem, buffers, TESSERA_V, WideTile::kValues, a.reach_v, &a.v));
    order_tiles(kernel.tile.tile_m(), choice.clusters, static_cast<TileCounter*>(buffers.workspace),
                a);
    TESSERA_RETURN_IF_ERROR(clear_max_logit(a, stream));
    const auto grid = static_cast<unsigned>(std::min(a.tiles, choice.clusters) * ctas);
    return launch_overlapping("sm90/wide", kernel.code->function, dim3(grid), WideTile::kThreads,
                              kernel.code->shared_bytes, &a, stream, ctas);
  }

 private:
  Choice clustered_, alone_;
  std::unique_ptr<Plan> fallback_;
};

}  // namespace

Result<std::unique_ptr<Plan>> plan_wide_forward(const Problem& canonical, const Device& device,
                                                std::unique_ptr<Plan> fallback) {
  const Sizes s = sizes_of(canonical);
  const DeviceScope scope(device.ordinal);
  TESSERA_RETURN_IF_ERROR(scope.status());
  const int dtype = canonical.tensor[TESSERA_Q].dtype;
  const WideKernel& kernel = *find_wide_kernel(dtype, s.dqk, s.dv);
  const Result<Choice> clustered = prepare(kernel);
  if (!clustered.ok()) return clustered.status();
  Choice alone = clustered.value();
  const WideKernel& low = low_kernel_of(kernel, canonical);
  if (&low != &kernel) {
    const Result<Choice> prepared = prepare(low);
    if (!prepared.ok()) return prepared.status();
    alone = prepared.value();
  }
  return std::unique_ptr<Plan>(
      std::make_unique<WidePlan>(clustered.value(), alone, std::move(fallback)));
}

}  // namespace tessera::cuda::sm90
