// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "cuda/common/blocks.h"
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
  int pack;     // heads that share a tile
  int queries;  // of a tile
  int splits;   // of the keys
};

// Rows of queries and packed heads that a CTA owns.
int rows_of(const Kernel& kernel) {
  return kernel.pass == Pass::decode ? kDecodeRows : kernel.tile.rows();
}

int pack_of(const Problem& problem, int rows) {
  if (has(problem, TESSERA_DROPOUT)) return 1;  // its patches are of one head
  const int64_t group = sizes_of(problem).group();
  const int64_t queries = std::max<int64_t>(most_queries(problem), 1);
  for (int64_t pack = std::min(group, rows / queries); pack > 1; --pack) {
    if (group % pack == 0) return static_cast<int>(pack);
  }
  return 1;
}

// Few queries: the kernel that lives on loads.
bool decodes(const Problem& problem) {
  return !has(problem, TESSERA_DROPOUT) &&
         most_queries(problem) * pack_of(problem, kDecodeRows) <= kDecodeRows;
}

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
  ForwardPlan(const KernelSet& forward, const KernelSet& decode, const DeviceInfo& device)
      : forward_(forward), decode_(decode), device_(device) {}

  int64_t workspace_bytes(const Problem& problem, int) const override {
    // Alignment may leave only the kernel of every feature.
    const KernelSet& kernels = kernels_of(problem);
    const auto bytes_of = [&](const Kernel& kernel) {
      return partial_bytes(problem, kernel) + map_bytes(problem, kernel);
    };
    return std::max(bytes_of(*kernels[features_of(problem)]), bytes_of(*kernels[kEveryFeature]));
  }

  Status run(const Problem& problem, const Buffers& buffers, const Device& device) const override {
    const DeviceScope scope(device.ordinal);
    TESSERA_RETURN_IF_ERROR(scope.status());
    const auto stream = static_cast<cudaStream_t>(buffers.stream);
    TESSERA_RETURN_IF_ERROR(report_checks(problem, buffers, stream));
    ForwardArgs args{};
    args.params = params_of(problem, buffers);
    Params& p = args.params;
    if (const View& max_logit = p.tensor[TESSERA_MAX_LOGIT]; max_logit.data) {
      TESSERA_RETURN_IF_ERROR(launch_fill(static_cast<float*>(max_logit.data), max_logit.stride[0],
                                          p.hq, -__builtin_huge_valf(), stream));
    }
    if (p.batch == 0 || p.sq == 0) return {};

    const Kernel& kernel = kernel_of(problem, p);
    const Cut cut = cut_of(problem, kernel, device_);
    args.pack = cut.pack;
    args.splits = cut.splits;
    const int columns = output_columns(kernel.bucket);
    args.dv_pieces = (p.dv + columns - 1) / columns;
    args.section =
        section_of(kSectionBytes, p.hq / cut.pack, bytes_of_keys(problem) * cut.pack / p.group);
    args.rows = stored_rows(p);
    if (cut.splits > 1) {
      args.partial_o = static_cast<float*>(buffers.workspace);
      args.partial_lse = args.partial_o + cut.splits * args.rows * p.hq * p.dv;
    }
    if (has_map(problem, kernel)) {
      TESSERA_RETURN_IF_ERROR(
          map_blocks(problem, p, Walked::kKeys, cut.queries, kernel.tile.step,
                     static_cast<char*>(buffers.workspace) + partial_bytes(problem, kernel),
                     &args.blocks, stream, reads_bits(kernel)));
    }
    const dim3 grid(static_cast<unsigned>(num_tile_slots(p.thd_q, p.sq, p.batch, cut.queries)),
                    static_cast<unsigned>(p.hq / cut.pack),
                    static_cast<unsigned>(args.dv_pieces * cut.splits));
    TESSERA_RETURN_IF_ERROR(launch(kernel, grid, &args, stream));
    return cut.splits > 1 ? launch_merge(merge_of(args), stream) : Status();
  }

 private:
  const KernelSet& kernels_of(const Problem& problem) const {
    return decode_[0] && decodes(problem) ? decode_ : forward_;
  }
  const Kernel& kernel_of(const Problem& problem, const Params& p) const {
    const KernelSet& kernels = kernels_of(problem);
    const unsigned features =
        features_of(problem, p) | (is_steep(p.softmax_scale) ? unsigned{kOther} : 0u);
    const Kernel& kernel = *kernels[features];
    // Heads share a tile where nothing or everything is expected of the scores.
    const bool shares = kernel.features != 0 && pack_of(problem, rows_of(kernel)) > 1;
    return shares ? *kernels[kEveryFeature] : kernel;
  }

  // Of k and v, of one head and a sequence of average length.
  static int64_t bytes_of_keys(const Problem& problem) {
    const Sizes s = sizes_of(problem);
    const int64_t keys = is_thd_k(problem) ? s.sk / std::max<int64_t>(s.batch, 1) : s.sk;
    return keys * (s.dqk + s.dv) * size_of(problem.tensor[TESSERA_K].dtype);
  }

  static int64_t stored_rows(const Params& p) { return (p.thd_q ? 1 : int64_t{p.batch}) * p.sq; }

  int64_t partial_bytes(const Problem& problem, const Kernel& kernel) const {
    const Cut cut = cut_of(problem, kernel, device_);
    if (cut.splits == 1) return 0;
    const Sizes s = sizes_of(problem);
    const int64_t rows = problem.tensor[TESSERA_Q].extent[0] * s.sq;
    const int64_t bytes =
        cut.splits * rows * s.hq * (s.dv + 1) * static_cast<int64_t>(sizeof(float));
    return (bytes + 255) / 256 * 256;
  }
  // The decoding kernel looks at every key.
  static bool has_map(const Problem& problem, const Kernel& kernel) {
    return kernel.pass != Pass::decode && has_block_map(problem);
  }
  int64_t map_bytes(const Problem& problem, const Kernel& kernel) const {
    if (!has_map(problem, kernel)) return 0;
    return block_map_bytes(problem, Walked::kKeys, cut_of(problem, kernel, device_).queries,
                           kernel.tile.step, reads_bits(kernel));
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
                            TESSERA_FP32,
                            4};
      merge.part[part].lse = {
          args.partial_lse + heads, {int64_t{p.sq} * p.hq, 1, p.hq, 0}, TESSERA_FP32, 4};
    }
    return merge;
  }

  KernelSet forward_, decode_;
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
  const KernelSet forward(Pass::forward, dtype, head_dim, shared_bytes);
  const KernelSet decode(Pass::decode, dtype, head_dim, shared_bytes);
  TESSERA_RETURN_IF_ERROR(prepare(forward[kEveryFeature]));
  TESSERA_RETURN_IF_ERROR(forward.prepare_all());
  TESSERA_RETURN_IF_ERROR(decode.prepare_all());
  return std::unique_ptr<Plan>(std::make_unique<ForwardPlan>(forward, decode, info.value()));
}

}  // namespace tessera::cuda::sm80
