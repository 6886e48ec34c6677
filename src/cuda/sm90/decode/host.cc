// SPDX-License-Identifier: Apache-2.0
// The host side of decoding: tensor maps, how units are cut, the launch.
#include <algorithm>
#include <climits>

#include "core/workspace.h"
#include "cuda/common/checks.h"
#include "cuda/common/launch.h"
#include "cuda/common/work/mark.h"
#include "cuda/sm90/decode/choice.h"
#include "cuda/sm90/decode/params.h"
#include "cuda/sm90/machine/boxes.h"
#include "cuda/sm90/machine/tensormap.h"
#include "cuda/sm90/plan.h"

namespace tessera::cuda::sm90 {
namespace {

struct DecodeCut : Cut {
  int cluster;  // see decode_cluster_of()
};

// A function of shapes and the device alone.
DecodeCut cut_for(const Problem& problem, const DecodeKernel& kernel, int cluster,
                  int multiprocessors, int most_multiprocessors) {
  CutTile tile = decode_tile_of(problem, kernel);
  if (cluster > 1) tile.beside = 1;
  DecodeCut cut{cut_of(problem, tile, multiprocessors, most_multiprocessors), cluster};
  if (cluster > 1) cut.ctas = cut.units * cluster;
  return cut;
}

Status make_maps(const Problem& problem, const Buffers& buffers, DecodeArgs& args) {
  MapShape q = shape_of(problem.tensor[TESSERA_Q], args.queries.divisor, 0);
  q.box_heads = args.pack;
  TESSERA_RETURN_IF_ERROR(make_tensor_map(q, buffers.data[TESSERA_Q], &args.q));
  for (const auto& [index, map] : {std::pair{TESSERA_K, &args.k}, {TESSERA_V, &args.v}}) {
    MapShape keys = shape_of(problem.tensor[index], args.box_keys, 0);
    keys.brings_boxes_alone = true;
    TESSERA_RETURN_IF_ERROR(make_tensor_map(keys, buffers.data[index], map));
  }
  return {};
}

void take_workspace(const DecodeKernel& kernel, const Cut& cut, Workspace& workspace,
                    DecodeArgs& args) {
  const Count rows = Count{cut.slots} * kernel.tile.rows;
  args.part_o = workspace.take<float>(rows * kernel.tile.bucket, 16);
  args.part_sums = workspace.take<float2>(rows);
  args.counters = workspace.take<unsigned long long>(cut.slots);
}

// most_queries: of the sequences that are computed.
Status launch(const Problem& problem, const Buffers& buffers, const DecodeKernel& kernel,
              const DecodeCut& cut, int most_queries, Workspace& workspace) {
  DecodeArgs args{};
  static_cast<WorkArgs&>(args) = work_args(params_of(problem, buffers), cut);
  args.least_apart = 1;
  args.most_queries = most_queries;
  args.cluster = cut.cluster;
  args.box_keys = keys_of_box(problem, DecodeTile::kKeys);
  args.page_size = Divisor::of(std::max(args.params.page_size, 1));
  args.mark = next_mark();
  TESSERA_RETURN_IF_ERROR(make_maps(problem, buffers, args));
  take_workspace(kernel, cut, workspace, args);
  return launch_overlapping(kernel.name, kernel.code->function,
                            dim3(static_cast<unsigned>(cut.ctas)), DecodeTile::kThreads,
                            kernel.code->shared_bytes, &args,
                            static_cast<cudaStream_t>(buffers.stream), cut.cluster);
}

class DecodePlan final : public Plan {
 public:
  DecodePlan(int multiprocessors, std::unique_ptr<Plan> general, std::unique_ptr<Plan> other)
      : multiprocessors_(multiprocessors), general_(std::move(general)), other_(std::move(other)) {}

  int64_t workspace_bytes(const Problem& problem, int num_threads) const override {
    if (!runs_in_decode(problem)) return other().workspace_bytes(problem, num_threads);
    Workspace workspace;
    DecodeArgs args{};
    take_workspace(decode_kernel_of(problem), own_cut(problem, multiprocessors_), workspace, args);
    return std::max(workspace.bytes(), general_->workspace_bytes(problem, num_threads));
  }

  Status run(const Problem& problem, const Buffers& buffers, const Device& device) const override {
    if (!runs_in_decode(problem)) return other().run(problem, buffers, device);
    if (!takes_call(problem, buffers)) return general_->run(problem, buffers, device);
    const DeviceScope scope(device.ordinal);
    TESSERA_RETURN_IF_ERROR(scope.status());
    TESSERA_RETURN_IF_ERROR(
        report_checks(problem, buffers, static_cast<cudaStream_t>(buffers.stream)));
    Workspace workspace(buffers.workspace);
    return launch(problem, buffers, decode_kernel_of(problem),
                  own_cut(problem, multiprocessors_for(buffers, multiprocessors_)), INT_MAX,
                  workspace);
  }

 private:
  const Plan& other() const { return other_ ? *other_ : *general_; }

  DecodeCut own_cut(const Problem& problem, int multiprocessors) const {
    return cut_for(problem, decode_kernel_of(problem), decode_cluster_of(problem, multiprocessors),
                   multiprocessors, multiprocessors_);
  }

  int multiprocessors_;
  std::unique_ptr<Plan> general_, other_;
};

}  // namespace

bool has_decode_kernel(const Problem& canonical) {
  return find_decode_kernel(canonical, 1) != nullptr;
}

void take_workspace_of_steps(const Problem& problem, const DecodeKernel& kernel,
                             int multiprocessors, Workspace& workspace) {
  DecodeArgs args{};
  take_workspace(kernel, cut_for(problem, kernel, 1, multiprocessors, multiprocessors), workspace,
                 args);
}

Status run_steps(const Problem& problem, const Buffers& buffers, const DecodeKernel& kernel,
                 int multiprocessors, Workspace& workspace) {
  const DecodeCut cut =
      cut_for(problem, kernel, 1, multiprocessors_for(buffers, multiprocessors), multiprocessors);
  return launch(problem, buffers, kernel, cut, static_cast<int>(queries_of_step(problem, kernel)),
                workspace);
}

Result<std::unique_ptr<Plan>> plan_decode(const Problem& canonical, const Device& device,
                                          std::unique_ptr<Plan> general,
                                          std::unique_ptr<Plan> other) {
  const Result<DeviceInfo> info = device_info(device.ordinal);
  if (!info.ok()) return info.status();
  const DeviceScope scope(device.ordinal);
  TESSERA_RETURN_IF_ERROR(scope.status());
  // The kernels of these types and head dims alone: asking anything of one loads it.
  for (const int rows : DecodeTile::kRows) {
    const DecodeKernel* kernel = find_decode_kernel(canonical, rows);
    if (!kernel) continue;
    TESSERA_RETURN_IF_ERROR(cuda_status(
        cudaFuncSetAttribute(kernel->code->function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             kernel->code->shared_bytes),
        "cudaFuncSetAttribute"));
  }
  return std::unique_ptr<Plan>(std::make_unique<DecodePlan>(info.value().multiprocessors,
                                                            std::move(general), std::move(other)));
}

}  // namespace tessera::cuda::sm90
