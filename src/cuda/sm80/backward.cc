// SPDX-License-Identifier: Apache-2.0
// The backward pass: row statistics, then dQ and dK/dV by kernels of their own (seven products),
// dbias, and sums over rows. Where a band and at most one feature shape the scores, one kernel
// makes all three with five products, and adds to dQ in any order; without a feature also in turn.
//
// Small problems in fp32 have kernels of plain multiply-adds: the 22 bits an operand that three
// fp16 products keep are enough where errors of many terms average out, and show where a gradient
// is the small difference of a few. A launch before the others gives their rows a delta of their
// own.
#include <algorithm>
#include <cstddef>

#include "cuda/common/blocks.h"
#include "cuda/sm80/plan.h"
#include "cuda/sm80/row_kernels.h"

namespace tessera::cuda::sm80 {
namespace {

int divided_up(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

// Seven products and dbias.
struct Kernels {
  const Kernel* dq;
  const Kernel* dkdv;
  const Kernel* dbias;
};

// In turn, larger sections leave the longest tiles of many heads to the end.
constexpr int64_t kSectionInTurnBytes = kSectionBytes / 2;

constexpr int64_t kPlainShortSide = 64, kPlainLongSide = 512;
constexpr int64_t kPlainWork = int64_t{1} << 24;  // scores x head dims; some 15 us

bool is_small(const Problem& problem) {
  const Sizes s = sizes_of(problem);
  if (problem.tensor[TESSERA_Q].dtype != TESSERA_FP32) return false;
  if (std::min(s.sq, s.sk) > kPlainShortSide || std::max(s.sq, s.sk) > kPlainLongSide) return false;
  const int64_t scores_of_head = std::max<int64_t>(s.sq * s.sk * (s.dqk + s.dv), 1);
  return s.batch * s.hq <= kPlainWork / scores_of_head;
}

Kernels kernels_of(int dtype, int64_t head_dim, int shared_bytes, bool plain) {
  const auto find = [&](Pass pass) {
    return find_kernel(pass, kEveryFeature, dtype, head_dim, shared_bytes, plain);
  };
  return {find(Pass::backward_dq), find(Pass::backward_dkdv), find(Pass::backward_dbias)};
}

class BackwardPlan final : public Plan {
 public:
  BackwardPlan(const KernelSet& fused, const Kernels& apart, const Kernels& plain)
      : fused_(fused), apart_(apart), plain_(plain) {}

  int64_t workspace_bytes(const Problem& problem, int) const override {
    const auto map_bytes = [&](const Kernel& kernel, Walked walked) {
      return block_map_bytes(problem, walked, kernel.tile.rows(), kernel.tile.step);
    };
    const Kernels& kernels = takes_plain(problem) ? plain_ : apart_;
    const int64_t apart = has_block_map(problem)
                              ? std::max(map_bytes(*kernels.dq, Walked::kKeys),
                                         map_bytes(*kernels.dkdv, Walked::kQueries))
                              : 0;
    const Kernel* kernel = fused_kernel(problem, features_of(problem));
    const int64_t fused = kernel
                              ? dq_sums_bytes(problem, *kernel) + dq_order_bytes(problem, *kernel) +
                                    fused_map_bytes(problem, *kernel)
                              : 0;
    return arrays_bytes(problem) + std::max(apart, fused);
  }

  Status run(const Problem& problem, const Buffers& buffers, const Device& device) const override {
    const DeviceScope scope(device.ordinal);
    TESSERA_RETURN_IF_ERROR(scope.status());
    const auto stream = static_cast<cudaStream_t>(buffers.stream);
    TESSERA_RETURN_IF_ERROR(report_checks(problem, buffers, stream));
    BackwardArgs args{};
    args.params = params_of(problem, buffers);
    const Params& p = args.params;
    auto* workspace = static_cast<char*>(buffers.workspace);
    args.lse = reinterpret_cast<float*>(workspace);
    args.delta = reinterpret_cast<float*>(workspace + row_bytes(problem));
    if (given(problem, TESSERA_DALIBI_SLOPES)) {
      args.slope_rows = reinterpret_cast<float*>(workspace + 2 * row_bytes(problem));
    }

    void* rest = workspace + arrays_bytes(problem);  // maps, of one kernel and then of the next
    const unsigned features =
        features_of(problem, p) | (has_aligned_queries(p) ? 0u : unsigned{kOther});
    const Kernel* kernel = fused_kernel(problem, features);
    if (kernel && (kernel->in_turn || adds_to_dq(p, *kernel))) {
      TESSERA_RETURN_IF_ERROR(run_fused(*kernel, problem, args, static_cast<char*>(rest), stream));
      TESSERA_RETURN_IF_ERROR(run_dbias(*apart_.dbias, problem, args, stream));
      return launch_row_sums(args, stream);
    }
    const bool plain = takes_plain(problem);
    const Kernels& kernels = plain ? plain_ : apart_;
    TESSERA_RETURN_IF_ERROR(launch_row_statistics(args, {}, nullptr, plain, stream));
    TESSERA_RETURN_IF_ERROR(run_dq(*kernels.dq, problem, args, rest, stream));
    TESSERA_RETURN_IF_ERROR(run_dkdv(*kernels.dkdv, problem, args, rest, stream));
    TESSERA_RETURN_IF_ERROR(run_dbias(*kernels.dbias, problem, args, stream));
    return launch_row_sums(args, stream);
  }

 private:
  static int64_t arrays_bytes(const Problem& problem) {
    return (given(problem, TESSERA_DALIBI_SLOPES) ? 3 : 2) * row_bytes(problem);
  }
  // A device may lack the shared memory for the widest heads.
  bool takes_plain(const Problem& problem) const {
    return is_small(problem) && plain_.dq && plain_.dkdv && plain_.dbias;
  }
  // The kernel that makes all three gradients, or null.
  const Kernel* fused_kernel(const Problem& problem, unsigned features) const {
    const Kernel* kernel = fused_[features];
    if (!kernel || takes_plain(problem) || given(problem, TESSERA_DALIBI_SLOPES)) return nullptr;
    const bool asked =
        given(problem, TESSERA_DQ) || given(problem, TESSERA_DK) || given(problem, TESSERA_DV);
    const bool any_order = given(problem, TESSERA_DQ) && !has(problem, TESSERA_DETERMINISTIC);
    return asked && (any_order || kernel->in_turn) ? kernel : nullptr;
  }
  // Without queries there is nothing to add to.
  static bool adds_to_dq(const Params& p, const Kernel& kernel) {
    return p.tensor[TESSERA_DQ].data &&
           num_tile_slots(p.thd_q, p.sq, p.batch, kernel.tile.step) > 0;
  }
  static int dq_slots(const Problem& problem, const Kernel& kernel) {
    const Sizes s = sizes_of(problem);
    return num_tile_slots(is_thd_q(problem), static_cast<int>(s.sq),
                          static_cast<int>(std::max<int64_t>(s.batch, 1)), kernel.tile.step);
  }
  static int64_t dq_sums_bytes(const Problem& problem, const Kernel& kernel) {
    if (!given(problem, TESSERA_DQ)) return 0;
    const int64_t tile = int64_t{kernel.tile.step} * kernel.bucket;
    return sizes_of(problem).hq * dq_slots(problem, kernel) * tile * 4;
  }
  // With the turn of each tile of sums.
  static int64_t dq_order_bytes(const Problem& problem, const Kernel& kernel) {
    if (!given(problem, TESSERA_DQ) || !has(problem, TESSERA_DETERMINISTIC)) return 0;
    const int64_t turns = sizes_of(problem).hq * dq_slots(problem, kernel) * 4;
    return (static_cast<int64_t>(sizeof(DqOrder)) + turns + 255) / 256 * 256;
  }
  static int64_t fused_map_bytes(const Problem& problem, const Kernel& kernel) {
    if (!has_block_map(problem)) return 0;
    return block_map_bytes(problem, Walked::kQueries, kernel.tile.rows(), kernel.tile.step, true);
  }

  // Of q, do and the sums of dQ of a sequence of average length, or of k and v, that a head walks.
  static int64_t head_bytes(const Params& p, int heads, int bucket) {
    const int64_t tokens = p.thd_q ? p.sq / std::max(p.batch, 1) : p.sq;
    return tokens * (p.hq / std::max(heads, 1)) * bucket * 8;
  }
  // Without a diagonal all walks are as long, and heads one after the other share more of L2.
  static int section_in_any_order(const Params& p, int heads, int bucket) {
    if ((p.left < 0 && p.right < 0) || p.page_size != 0) return 1;
    return section_of(kSectionBytes, heads, head_bytes(p, heads, bucket));
  }

  static Status run_fused(const Kernel& kernel, const Problem& problem, const BackwardArgs& b,
                          char* workspace, cudaStream_t stream) {
    const Params& p = b.params;
    const int outputs =
        (p.tensor[TESSERA_DK].data ? kDk : 0) | (p.tensor[TESSERA_DV].data ? kDv : 0);
    const int slots_k = num_tile_slots(p.thd_k, p.sk, p.batch, kernel.tile.rows());
    const int slots_q = num_tile_slots(p.thd_q, p.sq, p.batch, kernel.tile.step);
    DkdvArgs args{};
    args.b = b;
    args.outputs = outputs;
    args.pieces_k = 1;
    args.pool = TESSERA_K;
    args.dq_slots = slots_q;
    args.section = section_in_any_order(p, p.hk, kernel.bucket);
    Cleared cleared{};
    const void* function = kernel.in_turn;  // which makes no dQ where there are no sums
    if (adds_to_dq(p, kernel)) {
      args.dq_sums = reinterpret_cast<float*>(workspace);
      cleared = {workspace, dq_sums_bytes(problem, kernel) / 16};
      if (has(problem, TESSERA_DETERMINISTIC)) {  // the first to add stores
        args.section = section_of(kSectionInTurnBytes, p.hk, head_bytes(p, p.hk, kernel.bucket));
        args.order = reinterpret_cast<DqOrder*>(workspace + dq_sums_bytes(problem, kernel));
        args.turns = reinterpret_cast<int*>(args.order + 1);
        constexpr auto kKept = static_cast<int64_t>(offsetof(DqOrder, ticket));
        cleared = {&args.order->ticket, (dq_order_bytes(problem, kernel) - kKept) / 16};
      } else {
        function = kernel.function;
      }
    }
    TESSERA_RETURN_IF_ERROR(launch_row_statistics(b, cleared, args.order, false, stream));
    if (has_block_map(problem)) {
      char* maps = workspace + dq_sums_bytes(problem, kernel) + dq_order_bytes(problem, kernel);
      TESSERA_RETURN_IF_ERROR(map_blocks(problem, p, Walked::kQueries, kernel.tile.rows(),
                                         kernel.tile.step, maps, &args.blocks, stream, true));
    }
    if (slots_k > 0) {
      const dim3 grid(static_cast<unsigned>(slots_k), static_cast<unsigned>(p.hk));
      TESSERA_RETURN_IF_ERROR(launch_kernel("backward_fused", function, grid, kernel.tile.threads(),
                                            kernel.shared_bytes, &args, stream));
    }
    if (!args.dq_sums) return {};
    const dim3 grid(static_cast<unsigned>(slots_q), static_cast<unsigned>(p.hq));
    return launch_kernel("finish_dq", kernel.finish, grid, kernel.tile.threads(), 0, &args, stream);
  }

  // Of one float for each row and head, rounded so that each array keeps the workspace's alignment.
  static int64_t row_bytes(const Problem& problem) {
    const Sizes s = sizes_of(problem);
    return (problem.tensor[TESSERA_Q].extent[0] * s.sq * s.hq * 4 + 255) / 256 * 256;
  }

  static bool has_aligned_queries(const Params& p) {
    return p.tensor[TESSERA_Q].vector_bytes == 16 && p.tensor[TESSERA_DO].vector_bytes == 16;
  }

  static Status run_dq(const Kernel& kernel, const Problem& problem, const BackwardArgs& b,
                       void* maps, cudaStream_t stream) {
    const Params& p = b.params;
    const int slots = num_tile_slots(p.thd_q, p.sq, p.batch, kernel.tile.rows());
    const bool asked = p.tensor[TESSERA_DQ].data || b.slope_rows;
    if ((!asked && !kernel.plain) || slots == 0) return {};
    DqArgs args{b, {}, 0, section_in_any_order(p, p.hq, kernel.bucket)};
    if (has_block_map(problem)) {
      TESSERA_RETURN_IF_ERROR(map_blocks(problem, p, Walked::kKeys, kernel.tile.rows(),
                                         kernel.tile.step, maps, &args.blocks, stream));
    }
    dim3 grid(static_cast<unsigned>(slots), static_cast<unsigned>(p.hq));
    if (kernel.plain) TESSERA_RETURN_IF_ERROR(launch(kernel, grid, &args, stream));
    if (!asked) return {};
    args.pieces = divided_up(p.dqk, output_columns(kernel.bucket));
    grid.z = static_cast<unsigned>(args.pieces);
    return launch(kernel, grid, &args, stream);
  }

  static Status run_dkdv(const Kernel& kernel, const Problem& problem, const BackwardArgs& b,
                         void* maps, cudaStream_t stream) {
    const Params& p = b.params;
    const int outputs =
        (p.tensor[TESSERA_DK].data ? kDk : 0) | (p.tensor[TESSERA_DV].data ? kDv : 0);
    if (outputs == 0) return {};
    BlockMap blocks{};
    if (has_block_map(problem)) {
      TESSERA_RETURN_IF_ERROR(map_blocks(problem, p, Walked::kQueries, kernel.tile.rows(),
                                         kernel.tile.step, maps, &blocks, stream));
    }
    // Tables of their own: the pages of k and of v are walked one after the other.
    if (is_paged(problem) && given(problem, TESSERA_PAGE_TABLE_V)) {
      TESSERA_RETURN_IF_ERROR(launch_dkdv(kernel, b, blocks, outputs & kDk, TESSERA_K, stream));
      return launch_dkdv(kernel, b, blocks, outputs & kDv, TESSERA_V, stream);
    }
    return launch_dkdv(kernel, b, blocks, outputs, TESSERA_K, stream);
  }

  static Status launch_dkdv(const Kernel& kernel, const BackwardArgs& b, const BlockMap& blocks,
                            int outputs, int pool, cudaStream_t stream) {
    const Params& p = b.params;
    const int rows = kernel.tile.rows();
    DkdvArgs args{};
    args.b = b;
    args.blocks = blocks;
    args.outputs = outputs;
    args.pieces_k = 1;
    args.pool = pool;
    args.tiles_a_page = divided_up(p.page_size, rows);
    args.section = section_in_any_order(p, p.hk, kernel.bucket);
    int pieces = 1;
    if (kernel.tile.sharing == 1 && !makes_both(kernel.bucket)) {
      const int columns = output_columns(kernel.bucket);
      args.pieces_k = outputs & kDk ? divided_up(p.dqk, columns) : 0;
      pieces = args.pieces_k + (outputs & kDv ? divided_up(p.dv, columns) : 0);
    }
    const int pages =
        (outputs & kDk ? p.pages_k : 0) > (outputs & kDv ? p.pages_v : 0) ? p.pages_k : p.pages_v;
    const int64_t slots = p.page_size != 0 ? int64_t{pages} * args.tiles_a_page
                                           : num_tile_slots(p.thd_k, p.sk, p.batch, rows);
    if (outputs == 0 || slots == 0) return {};
    const dim3 grid(static_cast<unsigned>(slots), static_cast<unsigned>(p.hk),
                    static_cast<unsigned>(pieces));
    return launch(kernel, grid, &args, stream);
  }

  static Status run_dbias(const Kernel& kernel, const Problem& problem, const BackwardArgs& b,
                          cudaStream_t stream) {
    if (!b.params.tensor[TESSERA_DBIAS].data) return {};
    DbiasArgs args{b, {}};
    for (int axis = 0; axis < 4; ++axis) {
      args.extent[axis] = static_cast<int>(problem.tensor[TESSERA_BIAS].extent[axis]);
      if (args.extent[axis] == 0) return {};
    }
    const int64_t ctas_x =
        int64_t{args.extent[0]} * args.extent[1] * divided_up(args.extent[3], kernel.tile.step);
    const dim3 grid(static_cast<unsigned>(ctas_x),
                    static_cast<unsigned>(divided_up(args.extent[2], kernel.tile.rows())));
    return launch(kernel, grid, &args, stream);
  }

  KernelSet fused_;
  Kernels apart_, plain_;
};

}  // namespace

Result<std::unique_ptr<Plan>> plan_backward(const Problem& canonical, const Device& device) {
  const Sizes s = sizes_of(canonical);
  Result<DeviceInfo> info = device_info(device.ordinal);
  if (!info.ok()) return info.status();
  const DeviceScope scope(device.ordinal);
  TESSERA_RETURN_IF_ERROR(scope.status());
  const int dtype = canonical.tensor[TESSERA_Q].dtype;
  const int64_t head_dim = std::max(s.dqk, s.dv);
  const int shared_bytes = info.value().shared_memory_per_cta;
  const Kernels apart = kernels_of(dtype, head_dim, shared_bytes, false);
  for (const Kernel* kernel : {apart.dq, apart.dkdv, apart.dbias}) {
    TESSERA_RETURN_IF_ERROR(prepare(kernel));
  }
  const KernelSet fused(Pass::backward_fused, dtype, head_dim, shared_bytes);
  TESSERA_RETURN_IF_ERROR(fused.prepare_all());
  const Kernels plain = kernels_of(dtype, head_dim, shared_bytes, true);
  for (const Kernel* kernel : {plain.dq, plain.dkdv, plain.dbias}) {
    if (kernel) TESSERA_RETURN_IF_ERROR(prepare(kernel));
  }
  return std::unique_ptr<Plan>(std::make_unique<BackwardPlan>(fused, apart, plain));
}

}  // namespace tessera::cuda::sm80
