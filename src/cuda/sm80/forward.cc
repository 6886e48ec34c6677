// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "cuda/common/merge.h"
#include "cuda/sm80/args.h"
#include "cuda/sm80/plan.h"

namespace tessera::cuda::sm80 {
namespace {

// Queries of the longest sequence as far as the host can know.
int64_t most_queries(const Problem& problem) {
  const int64_t extent = sizes_of(problem).sq;
  if (!has(problem, TESSERA_MAX_SEQLEN_Q)) return extent;
  return std::min(extent, problem.max_seqlen_q);
}

// How a problem is cut into CTAs; a function of shapes and the device alone.
struct Cut {
  int pack;    // heads that share a tile
  int splits;  // of the keys
};

Cut cut_of(const Problem& problem, const Kernel& kernel, const DeviceInfo& device) {
  const Sizes s = sizes_of(problem);
  const int rows = kernel.tile.rows();
  Cut cut{1, 1};
  const int64_t queries = std::max<int64_t>(most_queries(problem), 1);
  if (!has(problem, TESSERA_DROPOUT)) {  // its patches are of one head
    for (int64_t pack = std::min<int64_t>(s.group(), rows / queries); pack > 1; --pack) {
      if (s.group() % pack == 0) {
        cut.pack = static_cast<int>(pack);
        break;
      }
    }
  }
  if (has(problem, TESSERA_BATCH_INVARIANT)) return cut;
  // Few CTAs and many keys: cut the keys until two CTAs share each multiprocessor, but leave every
  // part enough steps to pay for merging it.
  constexpr int64_t kLeastSteps = 4;
  const int64_t tiles = std::max<int64_t>((queries * cut.pack + rows - 1) / rows, 1);
  const int64_t ctas = std::max<int64_t>(s.batch, 1) * tiles * (s.hq / cut.pack);
  const int64_t steps = s.sk / kernel.tile.step / kLeastSteps;
  const int64_t splits = std::min<int64_t>({2 * device.multiprocessors / ctas, steps, kMaxMergeParts});
  cut.splits = static_cast<int>(std::max<int64_t>(splits, 1));
  return cut;
}

class ForwardPlan final : public Plan {
 public:
  ForwardPlan(const Kernel& lean, const Kernel& rich, const DeviceInfo& device)
      : lean_(lean), rich_(rich), device_(device) {}

  int64_t workspace_bytes(const Problem& problem, int) const override {
    // Lean or rich is decided by pointers too; room for the larger.
    return std::max(partial_bytes(problem, lean_), partial_bytes(problem, rich_));
  }

  Status run(const Problem& problem, const Buffers& buffers, const Device& device) const override {
    const DeviceScope scope(device.ordinal);
    TESSERA_RETURN_IF_ERROR(scope.status());
    const auto stream = static_cast<cudaStream_t>(buffers.stream);
    ForwardArgs args{};
    args.params = params_of(problem, buffers);
    Params& p = args.params;
    if (const View& max_logit = p.tensor[TESSERA_MAX_LOGIT]; max_logit.data) {
      TESSERA_RETURN_IF_ERROR(launch_fill(static_cast<float*>(max_logit.data), max_logit.stride[0],
                                          p.hq, -__builtin_huge_valf(), stream));
    }
    if (p.batch == 0 || p.sq == 0) return {};

    const Kernel& kernel = is_rich(p) || !has_aligned_keys(p) ? rich_ : lean_;
    const Cut cut = cut_of(problem, kernel, device_);
    args.pack = cut.pack;
    args.splits = cut.splits;
    const int columns = output_columns(kernel.bucket);
    args.dv_pieces = (p.dv + columns - 1) / columns;
    args.rows = stored_rows(p);
    if (cut.splits > 1) {
      args.partial_o = static_cast<float*>(buffers.workspace);
      args.partial_lse = args.partial_o + cut.splits * args.rows * p.hq * p.dv;
    }
    const int queries = kernel.tile.rows() / cut.pack;
    const dim3 grid(static_cast<unsigned>(num_tile_slots(p.thd_q, p.sq, p.batch, queries)),
                    static_cast<unsigned>(p.hq / cut.pack),
                    static_cast<unsigned>(args.dv_pieces * cut.splits));
    TESSERA_RETURN_IF_ERROR(launch(kernel, grid, &args, stream));
    return cut.splits > 1 ? launch_merge(merge_of(args), stream) : Status();
  }

 private:
  static int64_t stored_rows(const Params& p) { return (p.thd_q ? 1 : int64_t{p.batch}) * p.sq; }

  int64_t partial_bytes(const Problem& problem, const Kernel& kernel) const {
    const Cut cut = cut_of(problem, kernel, device_);
    if (cut.splits == 1) return 0;
    const Sizes s = sizes_of(problem);
    const int64_t rows = problem.tensor[TESSERA_Q].extent[0] * s.sq;
    return cut.splits * rows * s.hq * (s.dv + 1) * static_cast<int64_t>(sizeof(float));
  }

  static MergeLaunch merge_of(const ForwardArgs& args) {
    const Params& p = args.params;
    MergeLaunch merge{};
    merge.num_parts = args.splits;
    merge.batch = p.thd_q ? 1 : p.batch;
    merge.sq = p.sq;
    merge.hq = p.hq;
    merge.dv = p.dv;
    merge.o = p.tensor[TESSERA_O];
    merge.lse = p.tensor[TESSERA_LSE];
    for (int part = 0; part < args.splits; ++part) {
      const int64_t heads = part * args.rows * p.hq;
      merge.part[part].o = {args.partial_o + heads * p.dv,
                            {int64_t{p.sq} * p.hq * p.dv, int64_t{p.hq} * p.dv, p.dv, 1},
                            TESSERA_FP32, 4};
      merge.part[part].lse = {args.partial_lse + heads, {int64_t{p.sq} * p.hq, 1, p.hq, 0},
                              TESSERA_FP32, 4};
    }
    return merge;
  }

  const Kernel& lean_;
  const Kernel& rich_;
  DeviceInfo device_;
};

}  // namespace

Result<std::unique_ptr<Plan>> plan_forward(const Problem& canonical, const Device& device) {
  const Sizes s = sizes_of(canonical);
  const int dtype = canonical.tensor[TESSERA_Q].dtype;
  const int64_t head_dim = std::max(s.dqk, s.dv);
  Result<DeviceInfo> info = device_info(device.ordinal);
  if (!info.ok()) return info.status();
  const DeviceScope scope(device.ordinal);
  TESSERA_RETURN_IF_ERROR(scope.status());
  const int shared_bytes = info.value().shared_memory_per_cta;
  const Kernel* lean = find_kernel(Pass::forward, false, dtype, head_dim, shared_bytes);
  const Kernel* rich = find_kernel(Pass::forward, true, dtype, head_dim, shared_bytes);
  TESSERA_RETURN_IF_ERROR(prepare(lean));
  TESSERA_RETURN_IF_ERROR(prepare(rich));
  return std::unique_ptr<Plan>(std::make_unique<ForwardPlan>(*lean, *rich, info.value()));
}

}  // namespace tessera::cuda::sm80
