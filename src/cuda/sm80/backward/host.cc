// SPDX-License-Identifier: Apache-2.0
// The backward pass: row statistics, then dQ and dK/dV by kernels of their own (seven products),
// dbias, and sums over rows. Where a band and at most one feature shape the scores, one kernel
// makes all three with five products, and adds to dQ in any order; without a feature also in turn.
// With TESSERA_ACCUMULATE they make dq, dk and dv in the workspace, O(tokens), which are then added
// to the caller's; dbias, which may be large, dsink and dalibi_slopes are added as they are stored.
#include <algorithm>
#include <array>
#include <cstddef>
#include <optional>

#include "core/workspace.h"
#include "cuda/common/general.h"
#include "cuda/common/merge/merge.h"
#include "cuda/common/score/blocks.h"
#include "cuda/sm80/backward/row_kernels.h"
#include "cuda/sm80/plan.h"

namespace tessera::cuda::sm80 {
namespace {

constexpr int kAlignment = 256;  // of pieces of the workspace, as of the whole

int divided_up(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

// In turn, larger sections leave the longest tiles of many heads to the end.
constexpr int64_t kSectionInTurnBytes = kSectionBytes / 2;

class BackwardPlan : public Plan {
 public:
  explicit BackwardPlan(const BackwardKernels& kernels) : kernels_(kernels) {}

  int64_t workspace_bytes(const Problem& problem, int) const override {
    Workspace rows;
    BackwardArgs args{};
    take_stand_ins(problem, rows, args.params);
    take_rows(problem, rows, args);
    int64_t most = 0;
    const auto consider = [&](const Kernel& kernel, Walked walked) {
      Workspace workspace = rows;
      take_map(problem, kernel, walked, workspace);
      most = std::max(most, workspace.bytes());
    };
    consider(*kernels_.apart.dq, Walked::kKeys);
    consider(*kernels_.apart.dkdv, Walked::kQueries);
    if (const Kernel* kernel = kernels_.fused_of(problem, needs_of(problem))) {
      Workspace workspace = rows;
      take_sums(problem, *kernel, workspace);
      most = std::max(most, workspace.bytes());
    }
    return most;
  }

  Status run(const Problem& problem, const Buffers& buffers, const Device& device) const override {
    const DeviceScope scope(device.ordinal);
    TESSERA_RETURN_IF_ERROR(scope.status());
    const auto stream = static_cast<cudaStream_t>(buffers.stream);
    TESSERA_RETURN_IF_ERROR(report_checks(problem, buffers, stream));
    BackwardArgs args{};
    args.params = params_of(problem, buffers);
    Workspace workspace(buffers.workspace);
    const StandIns in = take_stand_ins(problem, workspace, args.params);
    take_rows(problem, workspace, args);
    TESSERA_RETURN_IF_ERROR(launch_copy(in.grad_o, stream));
    TESSERA_RETURN_IF_ERROR(run_kernels(problem, args, workspace, stream));
    for (const Copy& sum : in.sums) TESSERA_RETURN_IF_ERROR(launch_copy(sum, stream));
    return {};
  }

 protected:
  Status run_kernels(const Problem& problem, const BackwardArgs& args, Workspace workspace,
                     cudaStream_t stream) const {
    if (const Kernel* kernel = kernels_.fused_of(problem, args.params)) {
      TESSERA_RETURN_IF_ERROR(run_fused(*kernel, problem, args, workspace, stream));
      TESSERA_RETURN_IF_ERROR(run_dbias(*kernels_.apart.dbias, problem, args, stream));
      return launch_row_sums(args, stream);
    }
    const ApartKernels& kernels = kernels_.apart;
    TESSERA_RETURN_IF_ERROR(launch_row_statistics(args, {}, nullptr, stream));
    // The map of one kernel, and then of the next.
    TESSERA_RETURN_IF_ERROR(run_dq(*kernels.dq, problem, args, workspace, stream));
    TESSERA_RETURN_IF_ERROR(run_dkdv(*kernels.dkdv, problem, args, workspace, stream));
    TESSERA_RETURN_IF_ERROR(run_dbias(*kernels.dbias, problem, args, stream));
    return launch_row_sums(args, stream);
  }

  // What kernels read and write in place of the caller's tensors; copies of no rows: of none.
  struct StandIns {
    Copy grad_o;   // rounded to the inputs' dtype
    Copy sums[3];  // of dq, dk and dv in fp32, to be added to the caller's
  };
  static StandIns take_stand_ins(const Problem& problem, Workspace& workspace, Params& p) {
    StandIns in{};
    const int32_t dtype = problem.tensor[TESSERA_Q].dtype;
    if (problem.tensor[TESSERA_DO].dtype != dtype) {
      View& grad_o = p.tensor[TESSERA_DO];
      in.grad_o =
          copy_of(problem, TESSERA_DO, grad_o, take_like(problem, TESSERA_DO, dtype, workspace));
      grad_o = in.grad_o.to;
    }
    for (int i = 0; i < 3; ++i) {
      const int index = std::array{TESSERA_DQ, TESSERA_DK, TESSERA_DV}[i];
      View& gradient = p.tensor[index];
      if (given(problem, index) && has(problem, TESSERA_ACCUMULATE)) {
        const View own = take_like(problem, index, TESSERA_FP32, workspace);
        in.sums[i] = copy_of(problem, index, own, gradient);
        in.sums[i].adds = true;
        gradient = own;
      }
      // From 16 bytes on, kernels of 16 bits stage rows in their own dtype (write_gradient).
      if (gradient.dtype != dtype) gradient.vector_bytes = std::min(gradient.vector_bytes, 8);
    }
    return in;
  }
  // A tensor of a given one's extents.
  static View take_like(const Problem& problem, int index, int32_t dtype, Workspace& workspace) {
    const Tensor t = dense_like(problem.tensor[index], dtype);
    return view_of(t, workspace.take<char>(bytes_of(t), kAlignment));
  }
  static Copy copy_of(const Problem& problem, int index, const View& from, const View& to) {
    Copy copy{from, to, {}, false};
    std::copy_n(problem.tensor[index].extent, 4, copy.extent);
    return copy;
  }
  // A float for each row and head.
  static void take_rows(const Problem& problem, Workspace& workspace, BackwardArgs& args) {
    const Sizes s = sizes_of(problem);
    const Count rows = Count{problem.tensor[TESSERA_Q].extent[0]} * s.sq * s.hq;
    args.lse = workspace.take<float>(rows, kAlignment);
    args.delta = workspace.take<float>(rows, kAlignment);
    if (given(problem, TESSERA_DALIBI_SLOPES)) {
      args.slope_rows = workspace.take<float>(rows, kAlignment);
    }
  }
  static void* take_map(const Problem& problem, const Kernel& kernel, Walked walked,
                        Workspace& workspace, bool with_bits = false) {
    const int64_t bytes =
        has_block_map(problem)
            ? block_map_bytes(problem, walked, kernel.tile.rows(), kernel.tile.step, with_bits)
            : 0;
    return workspace.take<char>(bytes, kAlignment);
  }
  // What a fused kernel adds to, and its map.
  struct Sums {
    float* dq;
    DqOrder* order;  // with the turn of each tile of sums; null: not deterministic
    int* turns;
    int64_t dq_words, turn_words;  // of 16 bytes
    void* map;
  };
  static Sums take_sums(const Problem& problem, const Kernel& kernel, Workspace& workspace) {
    const bool has_dq = given(problem, TESSERA_DQ);
    const int64_t tiles = has_dq ? sizes_of(problem).hq * dq_slots(problem, kernel) : 0;
    const Count floats = Count{tiles} * kernel.tile.step * kernel.tile.bucket;
    Sums sums{};
    sums.dq = workspace.take<float>(floats, kAlignment);
    sums.dq_words = floats.value() / 4;
    if (has_dq && has(problem, TESSERA_DETERMINISTIC)) {
      sums.turn_words = (tiles + 3) / 4;
      sums.order = workspace.take<DqOrder>(1, kAlignment);
      sums.turns = workspace.take<int>(4 * sums.turn_words);
    }
    sums.map = take_map(problem, kernel, Walked::kQueries, workspace, true);
    return sums;
  }
  static int dq_slots(const Problem& problem, const Kernel& kernel) {
    const Sizes s = sizes_of(problem);
    return num_tile_slots(is_thd_q(problem), static_cast<int>(s.sq),
                          static_cast<int>(std::max<int64_t>(s.batch, 1)), kernel.tile.step);
  }

  // Bytes of q, do and the sums of dQ of a sequence of average length, or of k and v, that a head
  // walks.
  static int64_t head_bytes(const Params& p, int heads, int bucket) {
    const int64_t tokens = p.thd_q ? p.sq / std::max(p.batch, 1) : p.sq;
    return tokens * (p.hq / std::max(heads, 1)) * bucket * 8;
  }
  // Without a diagonal all walks are as long, and heads one after the other share more of L2.
  static int section_in_any_order(const Params& p, int heads, int bucket) {
    if ((p.window.left < 0 && p.window.right < 0) || p.page_size != 0) return 1;
    return section_of(kSectionBytes, heads, head_bytes(p, heads, bucket));
  }

  static Status run_fused(const Kernel& kernel, const Problem& problem, const BackwardArgs& b,
                          Workspace workspace, cudaStream_t stream) {
    const Params& p = b.params;
    const Sums sums = take_sums(problem, kernel, workspace);
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
    args.section = section_in_any_order(p, p.hk, kernel.tile.bucket);
    Cleared cleared{};
    const void* function = kernel.code->in_turn;  // which makes no dQ where there are no sums
    if (adds_to_dq(p, kernel)) {
      args.dq_sums = sums.dq;
      cleared = {sums.dq, sums.dq_words};
      if (sums.order) {  // the first to add stores
        args.section =
            section_of(kSectionInTurnBytes, p.hk, head_bytes(p, p.hk, kernel.tile.bucket));
        args.order = sums.order;
        args.turns = sums.turns;
        static_assert(sizeof(DqOrder) - offsetof(DqOrder, ticket) == 16);
        cleared = {&args.order->ticket, 1 + sums.turn_words};
      } else {
        function = kernel.code->function;
      }
    }
    TESSERA_RETURN_IF_ERROR(launch_row_statistics(b, cleared, args.order, stream));
    if (has_block_map(problem)) {
      TESSERA_RETURN_IF_ERROR(map_blocks(problem, p, Walked::kQueries, kernel.tile.rows(),
                                         kernel.tile.step, sums.map, &args.blocks, stream, true));
    }
    if (slots_k > 0) {
      const dim3 grid(static_cast<unsigned>(slots_k), static_cast<unsigned>(p.hk));
      TESSERA_RETURN_IF_ERROR(launch_kernel(kernel.name, function, grid, kernel.tile.threads(),
                                            kernel.tile.shared_bytes, &args, stream));
    }
    if (!args.dq_sums) return {};
    const dim3 grid(static_cast<unsigned>(slots_q), static_cast<unsigned>(p.hq));
    return launch_kernel("finish_dq", kernel.code->finish, grid, kernel.tile.threads(), 0, &args,
                         stream);
  }

  static Status run_dq(const Kernel& kernel, const Problem& problem, const BackwardArgs& b,
                       Workspace workspace, cudaStream_t stream, std::optional<float> below = {}) {
    const Params& p = b.params;
    const int slots = num_tile_slots(p.thd_q, p.sq, p.batch, kernel.tile.rows());
    const bool asked = p.tensor[TESSERA_DQ].data || b.slope_rows;
    if (!asked || slots == 0) return {};
    DqArgs args{b, {}, section_in_any_order(p, p.hq, kernel.tile.bucket), below.value_or(0)};
    if (has_block_map(problem)) {
      void* const map = take_map(problem, kernel, Walked::kKeys, workspace);
      TESSERA_RETURN_IF_ERROR(map_blocks(problem, p, Walked::kKeys, kernel.tile.rows(),
                                         kernel.tile.step, map, &args.blocks, stream));
    }
    const dim3 grid(static_cast<unsigned>(slots), static_cast<unsigned>(p.hq),
                    static_cast<unsigned>(divided_up(p.dqk, output_columns(kernel.tile.bucket))));
    if (!below) return launch(kernel, grid, &args, stream);
    return launch_kernel("dq of low rows", kernel.code->of_low, grid, kernel.tile.threads(),
                         kernel.tile.shared_bytes, &args, stream);
  }

  static Status run_dkdv(const Kernel& kernel, const Problem& problem, const BackwardArgs& b,
                         Workspace workspace, cudaStream_t stream) {
    const Params& p = b.params;
    const int outputs =
        (p.tensor[TESSERA_DK].data ? kDk : 0) | (p.tensor[TESSERA_DV].data ? kDv : 0);
    if (outputs == 0) return {};
    BlockMap blocks{};
    if (has_block_map(problem)) {
      void* const map = take_map(problem, kernel, Walked::kQueries, workspace);
      TESSERA_RETURN_IF_ERROR(map_blocks(problem, p, Walked::kQueries, kernel.tile.rows(),
                                         kernel.tile.step, map, &blocks, stream));
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
    args.section = section_in_any_order(p, p.hk, kernel.tile.bucket);
    int pieces = 1;
    if (kernel.tile.sharing == 1 && !makes_both(kernel.tile.bucket)) {
      const int columns = output_columns(kernel.tile.bucket);
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

  BackwardKernels kernels_;
};

// dq alone, of tiles with a low row alone: plan_dq_of_low_rows().
class LowRowsPlan final : public BackwardPlan {
 public:
  LowRowsPlan(const BackwardKernels& kernels, float below) : BackwardPlan(kernels), below_(below) {}

  int64_t workspace_bytes(const Problem& problem, int) const override {
    Workspace workspace;
    BackwardArgs args{};
    take_rows(problem, workspace, args);
    return workspace.bytes();
  }

  Status run(const Problem& problem, const Buffers& buffers, const Device& device) const override {
    const DeviceScope scope(device.ordinal);
    TESSERA_RETURN_IF_ERROR(scope.status());
    const auto stream = static_cast<cudaStream_t>(buffers.stream);
    BackwardArgs args{};
    args.params = params_of(problem, buffers);
    Workspace workspace(buffers.workspace);
    take_rows(problem, workspace, args);
    TESSERA_RETURN_IF_ERROR(launch_row_statistics(args, {}, nullptr, stream, below_));
    return run_dq(*kernels_.apart.dq, problem, args, workspace, stream, below_);
  }

 private:
  const float below_;
};

}  // namespace

Result<std::unique_ptr<Plan>> plan_backward(const Problem& canonical, const Device& device) {
  Result<DeviceInfo> info = device_info(device.ordinal);
  if (!info.ok()) return info.status();
  const DeviceScope scope(device.ordinal);
  TESSERA_RETURN_IF_ERROR(scope.status());
  const BackwardKernels kernels(canonical, info.value().shared_memory_per_cta);
  for (const Kernel* kernel : {kernels.apart.dq, kernels.apart.dkdv, kernels.apart.dbias}) {
    TESSERA_RETURN_IF_ERROR(prepare(kernel));
  }
  TESSERA_RETURN_IF_ERROR(prepare_all(kernels.fused));
  return std::unique_ptr<Plan>(std::make_unique<BackwardPlan>(kernels));
}

}  // namespace tessera::cuda::sm80

namespace tessera::cuda {

Result<std::unique_ptr<Plan>> plan_dq_of_low_rows(const Problem& problem, const Device& device,
                                                  float below) {
  const Result<DeviceInfo> info = device_info(device.ordinal);
  if (!info.ok()) return info.status();
  const DeviceScope scope(device.ordinal);
  TESSERA_RETURN_IF_ERROR(scope.status());
  const sm80::BackwardKernels kernels(problem, info.value().shared_memory_per_cta);
  TESSERA_RETURN_IF_ERROR(sm80::prepare(kernels.apart.dq));
  if (!kernels.apart.dq->code->of_low)
    return Status(TESSERA_REFUSED, "head_dim: must be at most 256");
  return std::unique_ptr<Plan>(std::make_unique<sm80::LowRowsPlan>(kernels, below));
}

}  // namespace tessera::cuda
