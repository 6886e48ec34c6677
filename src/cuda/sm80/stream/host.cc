// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm80/stream/host.h"

#include <algorithm>
#include <atomic>

#include "core/workspace.h"
#include "cuda/sm80/plan.h"
#include "cuda/sm80/stream/params.h"

namespace tessera::cuda::sm80 {
namespace {

// Parts of a unit that do not depend on the batch: enough that one sequence fills any GPU, but of
// so many keys that bringing a part costs little beside reading them.
constexpr int64_t kChunksOfSequence = 512, kMostChunks = 256, kLeastKeysOfChunk = 256,
                  kLeastKeysOfRow = 16;

// How a problem is cut; a function of shapes and the device alone.
struct Cut {
  int pack;
  int64_t units, chunks, least_steps;
  int64_t ctas;   // of the grid
  int64_t slots;  // of parts
};

Cut cut_of(const Problem& problem, const StreamKernel& kernel, const DeviceInfo& device,
           int multiprocessors) {
  const Sizes s = sizes_of(problem);
  const StreamTile& tile = kernel.tile;
  Cut cut{};
  cut.pack = pack_of(problem, tile.rows);
  const int64_t packs = s.hq / cut.pack;
  cut.units = units_of(problem, tile);
  const int64_t step_keys = int64_t{tile.step_keys()};
  const int64_t steps = std::max<int64_t>((s.sk + step_keys - 1) / step_keys, 1);
  const int64_t least_keys = std::max(kLeastKeysOfChunk, kLeastKeysOfRow * tile.rows);
  cut.least_steps = (least_keys + step_keys - 1) / step_keys;
  if (has(problem, TESSERA_BATCH_INVARIANT)) {
    cut.chunks = std::clamp<int64_t>(kChunksOfSequence / packs, 8, kMostChunks);
    cut.chunks = std::min(cut.chunks, (steps + cut.least_steps - 1) / cut.least_steps);
  }
  const int64_t resident = std::clamp<int64_t>(
      device.shared_memory_per_sm / (tile.shared_bytes + 1024), 1, 65536 / (tile.threads() * 128));
  // Sequences, packs and steps; where lengths are live, perhaps fewer.
  const int64_t cells = cut.units * (cut.chunks > 0 ? cut.chunks : steps);
  const int64_t most_ctas = std::min<int64_t>(resident * device.multiprocessors, kMostParts);
  cut.ctas = std::clamp<int64_t>(std::min(resident * multiprocessors, most_ctas), 1,
                                 std::max<int64_t>(cells, 1));
  cut.slots = cut.chunks > 0 ? cut.units * cut.chunks : 2 * most_ctas;
  return cut;
}

void take_workspace(const StreamKernel& kernel, const Cut& cut, Workspace& workspace,
                    StreamArgs& args) {
  const Count rows = Count{cut.slots} * kernel.tile.rows;
  args.part_o = workspace.take<float>(rows * kernel.tile.bucket, 16);
  args.part_sums = workspace.take<float2>(rows);
  args.announced = workspace.take<unsigned long long>(cut.slots);
}

// What announces the parts of this launch: a value that stray memory is unlikely to hold.
uint64_t next_mark() {
  constexpr uint64_t kMark = 0x5e1f'a7c3'9b4d'0000;
  static std::atomic<uint64_t> launches{0};
  return kMark + launches.fetch_add(1, std::memory_order_relaxed);
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
  StreamArgs args{};
  take_workspace(kernel, cut_of(problem, kernel, device, device.multiprocessors), workspace, args);
  return workspace.bytes();
}

Status run_stream(const Problem& problem, const Buffers& buffers, const Params& params,
                  const StreamKernel& kernel, const DeviceInfo& device, cudaStream_t stream) {
  const Cut cut =
      cut_of(problem, kernel, device, multiprocessors_for(buffers, device.multiprocessors));
  StreamArgs args{};
  args.params = params;
  args.pack = cut.pack;
  args.queries = Divisor::of(kernel.tile.rows / cut.pack);
  args.packs = Divisor::of(params.hq / cut.pack);
  args.packs_kv = Divisor::of(params.group / cut.pack);
  args.page_size = Divisor::of(std::max(params.page_size, 1));
  args.units = static_cast<int>(cut.units);
  args.most_runs = static_cast<int>(cut.slots / 2);
  args.chunks = static_cast<int>(cut.chunks);
  args.least_steps = static_cast<int>(cut.least_steps);
  args.mark = next_mark();
  Workspace workspace(buffers.workspace);
  take_workspace(kernel, cut, workspace, args);
  return launch_kernel(kernel.name, kernel.code->function, dim3(static_cast<unsigned>(cut.ctas)),
                       kernel.tile.threads(), kernel.tile.shared_bytes, &args, stream);
}

}  // namespace tessera::cuda::sm80
