// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm80/stream/host.h"

#include <algorithm>

#include "core/workspace.h"
#include "cuda/common/merge/merge.h"
#include "cuda/common/score/blocks.h"
#include "cuda/sm80/args.h"
#include "cuda/sm80/plan.h"

namespace tessera::cuda::sm80 {
namespace {

constexpr int kAlignment = 256;  // of a map in the workspace, as of the whole

// How a problem is cut into CTAs; a function of shapes and the device alone.
struct Cut {
  int pack;     // heads that share a tile
  int queries;  // of a tile
  int splits;   // of the keys
};

Cut cut_of(const Problem& problem, const Kernel& kernel, const DeviceInfo& device) {
  const Sizes s = sizes_of(problem);
  const int rows = rows_of(kernel), pack = pack_of(problem, rows);
  Cut cut{pack, rows / pack, 1};
  if (has(problem, TESSERA_BATCH_INVARIANT)) return cut;
  // Few CTAs and many keys: cut the keys until two CTAs share each multiprocessor, but leave every
  // part enough keys to pay for merging it.
  constexpr int64_t kLeastKeys = 256;
  const int64_t tiles =
      std::max<int64_t>((most_queries(problem) + cut.queries - 1) / cut.queries, 1);
  const int64_t ctas = std::max<int64_t>(s.batch, 1) * tiles * (s.hq / pack);
  const int64_t splits =
      std::min<int64_t>({2 * device.multiprocessors / ctas, s.sk / kLeastKeys, kMaxMergeParts});
  cut.splits = static_cast<int>(std::max<int64_t>(splits, 1));
  return cut;
}

class ForwardPlan final : public Plan {
 public:
  ForwardPlan(const ForwardKernels& kernels, const DeviceInfo& device)
      : kernels_(kernels), device_(device) {}

  int64_t workspace_bytes(const Problem& problem, int) const override {
    // Alignment may leave only the kernel of every feature.
    const KernelSet& kernels = kernels_.of(problem);
    const auto bytes_of = [&](const Kernel& kernel) {
      Workspace workspace;
      take_workspace(problem, kernel, cut_of(problem, kernel, device_), workspace);
      return workspace.bytes();
    };
    int64_t bytes = std::max(bytes_of(*kernels[needs_of(problem)]), bytes_of(*kernels[kGeneral]));
    if (const StreamKernel* stream = kernels_.stream_of(problem)) {
      bytes = std::max(bytes, stream_workspace_bytes(problem, *stream, device_));
    }
    Workspace own;
    take_part(problem, own);
    return (Count{own.bytes()} + bytes).value();
  }

  Status run(const Problem& problem, const Buffers& buffers, const Device& device) const override {
    const DeviceScope scope(device.ordinal);
    TESSERA_RETURN_IF_ERROR(scope.status());
    const auto stream = static_cast<cudaStream_t>(buffers.stream);
    TESSERA_RETURN_IF_ERROR(report_checks(problem, buffers, stream));
    Params p = params_of(problem, buffers);
    if (const View& max_logit = p.tensor[TESSERA_MAX_LOGIT]; max_logit.data) {
      TESSERA_RETURN_IF_ERROR(launch_fill(static_cast<float*>(max_logit.data), max_logit.stride[0],
                                          p.hq, -__builtin_huge_valf(), stream));
    }
    if (p.batch == 0 || p.sq == 0) return {};
    if (!has(problem, TESSERA_ACCUMULATE)) return run_part(problem, buffers, p, stream);

    // What the outputs hold is one more part of the keys.
    View &o = p.tensor[TESSERA_O], &lse = p.tensor[TESSERA_LSE];
    MergeLaunch merge = merge_into(p);
    Workspace workspace(buffers.workspace);
    const Part part = take_part(problem, workspace);
    merge.num_parts = 2;
    merge.part[0] = {o, lse};
    merge.part[1] = part.results;
    o = part.results.o;
    lse = part.results.lse;
    Buffers rest = buffers;
    rest.workspace = part.workspace;
    TESSERA_RETURN_IF_ERROR(run_part(problem, rest, p, stream));
    return launch_merge(merge, stream);
  }

 private:
  // Queues what writes o and lse of the call's own keys, where p says.
  Status run_part(const Problem& problem, const Buffers& buffers, const Params& p,
                  cudaStream_t stream) const {
    if (const StreamKernel* few_rows = kernels_.stream_of(problem, p)) {
      return run_stream(problem, buffers, p, *few_rows, device_, stream);
    }
    ForwardArgs args{};
    args.params = p;
    const Kernel& kernel = kernels_.of(problem, p);
    const Cut cut = cut_of(problem, kernel, device_);
    args.pack = cut.pack;
    args.splits = cut.splits;
    const int columns = output_columns(kernel.tile.bucket);
    args.dv_pieces = (p.dv + columns - 1) / columns;
    args.section =
        section_of(kSectionBytes, p.hq / cut.pack, bytes_of_keys(problem) * cut.pack / p.group);
    args.rows = stored_rows(problem);
    Workspace workspace(buffers.workspace);
    const Pieces pieces = take_workspace(problem, kernel, cut, workspace);
    args.partial_o = pieces.partial_o;
    args.partial_lse = pieces.partial_lse;
    if (has_map(problem, kernel)) {
      TESSERA_RETURN_IF_ERROR(map_blocks(problem, p, Walked::kKeys, cut.queries, kernel.tile.step,
                                         pieces.map, &args.blocks, stream, reads_bits(kernel)));
    }
    const dim3 grid(static_cast<unsigned>(num_tile_slots(p.thd_q, p.sq, p.batch, cut.queries)),
                    static_cast<unsigned>(p.hq / cut.pack),
                    static_cast<unsigned>(args.dv_pieces * cut.splits));
    TESSERA_RETURN_IF_ERROR(launch(kernel, grid, &args, stream));
    if (cut.splits == 1) return {};
    return launch_merge(PartsMerge::of(p, cut.splits, args.partial_o, args.partial_lse), false,
                        stream);
  }

  // The o, in fp32, and lse of a call that adds to others, and the workspace behind them.
  struct Part {
    MergePart results;
    void* workspace;
  };
  static Part take_part(const Problem& problem, Workspace& workspace) {
    Part part{};
    if (has(problem, TESSERA_ACCUMULATE)) {
      const Tensor o = dense_like(problem.tensor[TESSERA_O], TESSERA_FP32);
      const int64_t sq = o.extent[1], hq = o.extent[2];
      const Count rows = Count{o.extent[0]} * sq * hq;
      part.results = {view_of(o, workspace.take<char>(bytes_of(o), kAlignment)),
                      {workspace.take<float>(rows), {hq * sq, sq, 1, 0}, TESSERA_FP32, 4}};
    }
    part.workspace = workspace.take<char>(0, kAlignment);
    return part;
  }

  // Bytes of k and v of one head and a sequence of average length.
  static int64_t bytes_of_keys(const Problem& problem) {
    const Sizes s = sizes_of(problem);
    const int64_t keys = is_thd_k(problem) ? s.sk / std::max<int64_t>(s.batch, 1) : s.sk;
    return keys * (s.dqk + s.dv) * size_of(problem.tensor[TESSERA_K].dtype);
  }

  // All rows of q, of packed sequences and of those of a batch.
  static int64_t stored_rows(const Problem& problem) {
    return problem.tensor[TESSERA_Q].extent[0] * sizes_of(problem).sq;
  }

  struct Pieces {
    float *partial_o, *partial_lse;  // null: the keys are not cut
    void* map;
  };
  static Pieces take_workspace(const Problem& problem, const Kernel& kernel, const Cut& cut,
                               Workspace& workspace) {
    const Sizes s = sizes_of(problem);
    Pieces pieces{};
    if (cut.splits > 1) {
      const Count rows = cut.splits * Count{stored_rows(problem)} * s.hq;
      pieces.partial_o = workspace.take<float>(rows * s.dv);
      pieces.partial_lse = workspace.take<float>(rows);
    }
    const int64_t map_bytes = has_map(problem, kernel)
                                  ? block_map_bytes(problem, Walked::kKeys, cut.queries,
                                                    kernel.tile.step, reads_bits(kernel))
                                  : 0;
    pieces.map = workspace.take<char>(map_bytes, kAlignment);
    return pieces;
  }

  // The decoding kernel looks at every key.
  static bool has_map(const Problem& problem, const Kernel& kernel) {
    return kernel.tile.loop != Loop::decode && has_block_map(problem);
  }

  ForwardKernels kernels_;
  DeviceInfo device_;
};

}  // namespace

Result<std::unique_ptr<Plan>> plan_forward(const Problem& canonical, const Device& device) {
  Result<DeviceInfo> info = device_info(device.ordinal);
  if (!info.ok()) return info.status();
  const DeviceScope scope(device.ordinal);
  TESSERA_RETURN_IF_ERROR(scope.status());
  const ForwardKernels kernels(canonical, info.value().shared_memory_per_cta);
  TESSERA_RETURN_IF_ERROR(prepare(kernels.forward[kGeneral]));
  TESSERA_RETURN_IF_ERROR(prepare_all(kernels.forward));
  TESSERA_RETURN_IF_ERROR(prepare_all(kernels.decode));
  for (const StreamKernel* kernel : kernels.stream) {
    if (kernel) TESSERA_RETURN_IF_ERROR(prepare(*kernel));
  }
  return std::unique_ptr<Plan>(std::make_unique<ForwardPlan>(kernels, info.value()));
}

}  // namespace tessera::cuda::sm80
