// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm80/stream/host.h"

#include <algorithm>

#include "core/workspace.h"
#include "cuda/common/few/args.h"
#include "cuda/common/work/cut.h"
#include "cuda/common/work/mark.h"
#include "cuda/sm80/plan.h"

namespace tessera::cuda::sm80 {
namespace {

// A part that does not depend on the batch has so many keys that bringing it costs little beside
// reading them.
constexpr int kLeastKeysOfChunk = 256, kLeastKeysOfRow = 16, kMostChunks = 256;

// A function of shapes and the device alone.
Cut cut_of(const Problem& problem, const StreamKernel& kernel, const DeviceInfo& device,
           int multiprocessors) {
  const StreamTile& tile = kernel.tile;
  const CutTile cut_tile{.rows = tile.rows,
                         .pack = pack_of(problem, tile.rows),
                         .step_keys = tile.step_keys(),
                         .least_keys = std::max(kLeastKeysOfChunk, kLeastKeysOfRow * tile.rows),
                         .most_parts = kMostChunks};
  const int64_t resident = std::clamp<int64_t>(
      device.shared_memory_per_sm / (tile.shared_bytes + 1024), 1, 65536 / (tile.threads() * 128));
  const int64_t most_ctas = std::min<int64_t>(resident * device.multiprocessors, kMostParts);
  return cut_of(problem, cut_tile, resident * multiprocessors, most_ctas);
}

// True if a CTA has so many steps that it pays to cut units on their own, which takes the way to the
// first load 1 us longer: a run that has the ends of two units brings two parts (8 x 8k, 32 heads on
// 8, on an H200: 81 us, and 77).
bool has_long_runs(const Problem& problem, const Cut& cut) {
  constexpr int64_t kManySteps = 8;
  const int64_t steps = sizes_of(problem).sk / cut.tile.step_keys;
  return cut.units * steps / cut.ctas >= kManySteps;
}

void take_workspace(const StreamKernel& kernel, const Cut& cut, Workspace& workspace,
                    PartsArgs& args) {
  const Count rows = Count{cut.slots} * kernel.tile.rows;
  args.part_o = workspace.take<float>(rows * kernel.tile.bucket, 16);
  args.part_sums = workspace.take<float2>(rows);
  args.counters = workspace.take<unsigned long long>(cut.slots);
}

}  // namespace

Status prepare(const StreamKernel& kernel) {
  return cuda_status(
      cudaFuncSetAttribute(kernel.code->function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           kernel.tile.shared_bytes),
      "cudaFuncSetAttribute");
}

int64_t stream_workspace_bytes(const Problem& problem, const StreamKernel& kernel,
                               const DeviceInfo& device) {
  Workspace workspace;
  PartsArgs args{};
  take_workspace(kernel, cut_of(problem, kernel, device, device.multiprocessors), workspace, args);
  return workspace.bytes();
}

Status run_stream(const Problem& problem, const Buffers& buffers, const Params& params,
                  const StreamKernel& kernel, const DeviceInfo& device, cudaStream_t stream) {
  const Cut cut =
      cut_of(problem, kernel, device, multiprocessors_for(buffers, device.multiprocessors));
  PartsArgs args{};
  static_cast<WorkArgs&>(args) = work_args(params, cut);
  args.least_apart = has_long_runs(problem, cut) ? 1 : 0;
  args.page_size = Divisor::of(std::max(params.page_size, 1));
  args.mark = next_mark();
  Workspace workspace(buffers.workspace);
  take_workspace(kernel, cut, workspace, args);
  return launch_kernel(kernel.name, kernel.code->function, dim3(static_cast<unsigned>(cut.ctas)),
                       kernel.tile.threads(), kernel.tile.shared_bytes, &args, stream);
}

}  // namespace tessera::cuda::sm80
