// SPDX-License-Identifier: Apache-2.0
// The host side of latent attention: tensor maps, how units are cut, the two launches.
#include <algorithm>

#include "core/workspace.h"
#include "cuda/common/checks.h"
#include "cuda/common/launch.h"
#include "cuda/common/work/mark.h"
#include "cuda/sm90/machine/boxes.h"
#include "cuda/sm90/machine/tensormap.h"
#include "cuda/sm90/mla/choice.h"
#include "cuda/sm90/mla/params.h"
#include "cuda/sm90/plan.h"

namespace tessera::cuda::sm90 {
namespace {

// Blocks that a CTA takes at least of a unit that is cut on its own: so many that parts, of 256 KB
// each, are some 32, and no more than keep a CTA busy as long as bringing its part.
int least_blocks(const Problem& problem) {
  constexpr int64_t kFewParts = 32, kMost = 4;
  const int64_t blocks = sizes_of(problem).sk / MlaTile::kKeys;
  return static_cast<int>(std::clamp<int64_t>(blocks / kFewParts, 1, kMost));
}

// Rows that are summed side by side, by CTAs of 128 threads: what a GPU has room for.
constexpr int64_t kMostMerged = 2048;
constexpr int64_t kFewUnits = 8;  // with several threads for each column

// A function of shapes and the device alone. Where two CTAs share a unit, it counts pairs.
Cut cut_for(const Problem& problem, int multiprocessors, int most_multiprocessors) {
  const CutTile tile = mla_tile_of(problem);
  const int ctas = tile.rows / MlaTile::kRows;
  return cut_of(problem, tile, std::max(multiprocessors / ctas, 1),
                std::max(most_multiprocessors / ctas, 1));
}

class MlaPlan final : public Plan {
 public:
  MlaPlan(int multiprocessors, std::unique_ptr<Plan> general, std::unique_ptr<Plan> other)
      : multiprocessors_(multiprocessors), general_(std::move(general)), other_(std::move(other)) {}

  int64_t workspace_bytes(const Problem& problem, int num_threads) const override {
    if (!runs_in_mla(problem)) return other().workspace_bytes(problem, num_threads);
    Workspace workspace;
    MlaArgs args{};
    take_workspace(mla_kernel_of(problem), cut_for(problem, multiprocessors_, multiprocessors_),
                   workspace, args);
    return std::max(workspace.bytes(), general_->workspace_bytes(problem, num_threads));
  }

  Status run(const Problem& problem, const Buffers& buffers, const Device& device) const override {
    if (!runs_in_mla(problem)) return other().run(problem, buffers, device);
    if (!takes_call(problem, buffers)) return general_->run(problem, buffers, device);
    const DeviceScope scope(device.ordinal);
    TESSERA_RETURN_IF_ERROR(scope.status());
    const auto stream = static_cast<cudaStream_t>(buffers.stream);
    TESSERA_RETURN_IF_ERROR(report_checks(problem, buffers, stream));
    const MlaKernel& kernel = mla_kernel_of(problem);
    const Cut cut =
        cut_for(problem, multiprocessors_for(buffers, multiprocessors_), multiprocessors_);
    MlaArgs args{};
    static_cast<WorkArgs&>(args) = work_args(params_of(problem, buffers), cut);
    args.least_apart = least_blocks(problem);
    args.pack_shift = __builtin_ctz(static_cast<unsigned>(args.pack));
    args.box_keys = keys_of_box(problem, MlaTile::kKeys);
    args.page_size = Divisor::of(std::max(args.params.page_size, 1));
    args.mark = next_mark();
    TESSERA_RETURN_IF_ERROR(make_maps(problem, buffers, args));
    Workspace workspace(buffers.workspace);
    take_workspace(kernel, cut, workspace, args);
    const auto ctas = static_cast<unsigned>(cut.ctas * kernel.tile.ctas);
    TESSERA_RETURN_IF_ERROR(launch_overlapping(kernel.name, kernel.code->function, dim3(ctas),
                                               MlaTile::kThreads, kernel.code->shared_bytes, &args,
                                               stream, kernel.tile.sharers()));
    // Few units have many parts each.
    const int64_t rows = kernel.tile.rows(), side_by_side = std::min(cut.units, kMostMerged / rows);
    const int64_t groups = std::clamp<int64_t>(kFewUnits / cut.units, 1, MlaTile::kMostMergeGroups);
    return launch_overlapping(
        kernel.name, kernel.code->merge,
        dim3(static_cast<unsigned>(rows), static_cast<unsigned>(side_by_side)),
        static_cast<int>(groups) * kernel.tile.dv / 4, 0, &args, stream);
  }

 private:
  const Plan& other() const { return other_ ? *other_ : *general_; }

  static Status make_maps(const Problem& problem, const Buffers& buffers, MlaArgs& args) {
    const int heads = std::min(args.pack, MlaTile::kRows);
    MapShape q = shape_of(problem.tensor[TESSERA_Q], MlaTile::kRows / heads, 0);
    q.box_heads = heads;
    TESSERA_RETURN_IF_ERROR(make_tensor_map(q, buffers.data[TESSERA_Q], &args.q));
    if (mla_kernel_of(problem).tile.keys != MlaKeys::boxes) return {};
    return map_of(problem, buffers, TESSERA_K, args.box_keys, 0, &args.k);
  }

  static void take_workspace(const MlaKernel& kernel, const Cut& cut, Workspace& workspace,
                             MlaArgs& args) {
    const Count rows = Count{cut.slots} * kernel.tile.rows();
    args.part_o = workspace.take<float>(rows * kernel.tile.dv, 16);
    args.part_sums = workspace.take<float2>(rows);
    args.cut = workspace.take<CutUnit>(cut.units);
    args.units_found = workspace.take<int>(1);
  }

  int multiprocessors_;
  std::unique_ptr<Plan> general_, other_;
};

}  // namespace

bool has_mla_head_dims(const Problem& canonical) {
  return find_mla_kernel(canonical, MlaTile::kRows) != nullptr;
}

Result<std::unique_ptr<Plan>> plan_mla(const Problem& canonical, const Device& device,
                                       std::unique_ptr<Plan> general, std::unique_ptr<Plan> other) {
  const Result<DeviceInfo> info = device_info(device.ordinal);
  if (!info.ok()) return info.status();
  const DeviceScope scope(device.ordinal);
  TESSERA_RETURN_IF_ERROR(scope.status());
  // A plan serves units of one CTA and of two, and pages of all sizes.
  for (const MlaKernel& kernel : mla_kernels()) {
    if (!has_types_of(kernel, canonical)) continue;
    TESSERA_RETURN_IF_ERROR(cuda_status(
        cudaFuncSetAttribute(kernel.code->function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             kernel.code->shared_bytes),
        "cudaFuncSetAttribute"));
  }
  return std::unique_ptr<Plan>(std::make_unique<MlaPlan>(info.value().multiprocessors,
                                                         std::move(general), std::move(other)));
}

}  // namespace tessera::cuda::sm90
