// SPDX-License-Identifier: Apache-2.0
// The host side of the backward pass: workspace, tensor maps, the order of tiles, three launches.
#include "cuda/sm90/dbias/host.h"

#include <algorithm>

#include "core/workspace.h"
#include "cuda/common/checks.h"
#include "cuda/common/launch.h"
#include "cuda/sm90/backward/apart/plan.h"
#include "cuda/sm90/backward/choice.h"
#include "cuda/sm90/backward/schedule/order.h"
#include "cuda/sm90/backward/score/pack_mask.h"
#include "cuda/sm90/backward/sink.h"
#include "cuda/sm90/machine/tensormap.h"
#include "cuda/sm90/plan.h"

namespace tessera::cuda::sm90 {
namespace {

constexpr int kTensors[] = {TESSERA_Q,  TESSERA_K,  TESSERA_V,  TESSERA_O,
                            TESSERA_DO, TESSERA_DQ, TESSERA_DK, TESSERA_DV};

// The last kernel of a call that is over in microseconds has a CTA for each part of a block. While
// tiles run there is room on few multiprocessors, where all of them would settle: shared memory
// that nobody uses keeps them to so many each.
constexpr int kCtasOfSpread = 4, kSpreadingBytes = (200 << 10) / kCtasOfSpread;

// Three launches, in the order of the stream, and that of dsink; by any row of backward/table.def.
class FusedBackward {
 public:
  explicit FusedBackward(int multiprocessors) : multiprocessors_(multiprocessors) {}

  int64_t workspace_bytes(const BackwardKernel& kernel, const Problem& problem) const {
    BackwardParams a{};
    set_problem(kernel, problem, Buffers{}, a);
    Workspace workspace;
    take_workspace(kernel, problem, workspace, a);
    return workspace.bytes();
  }

  // rounded: of a row with products of E4M3, else null. The device is current.
  Status run(const BackwardKernel& kernel, const Problem& problem, const Buffers& buffers,
             const Device& device, void* base, const Rounded* rounded = nullptr) const {
    const auto stream = static_cast<cudaStream_t>(buffers.stream);
    const BackwardTile& tile = kernel.tile;
    RoundedBackwardParams a{};
    set_problem(kernel, problem, buffers, a);
    const Params& p = a.problem;
    TESSERA_RETURN_IF_ERROR(set_maps(kernel, problem, buffers, a));
    if (rounded) TESSERA_RETURN_IF_ERROR(set_rounded(kernel, problem, *rounded, a));
    Workspace workspace(base);
    const OfOthers of_others = take_workspace(kernel, problem, workspace, a);
    if (given(problem, TESSERA_MASK)) {
      TESSERA_RETURN_IF_ERROR(
          pack_backward_mask(problem.tensor[TESSERA_MASK], tile, of_others.mask, a, stream));
    }

    const auto heads = static_cast<unsigned>(p.hq);
    TESSERA_RETURN_IF_ERROR(launch(kernel.name, kernel.code->rows,
                                   dim3(static_cast<unsigned>(a.slots), heads), kRowThreads,
                                   kernel.code->rows_shared_bytes, a, stream));
    const int tiles =
        a.parts > 0 ? a.parts * (a.last_head + a.heads_of_last.divisor) : a.tiles * a.sequences;
    TESSERA_RETURN_IF_ERROR(launch(kernel.name, kernel.code->gradients,
                                   dim3(static_cast<unsigned>(tiles * tile.ctas())),
                                   BackwardTile::kThreads, kernel.code->shared_bytes, a, stream));
    if (a.dq_sums) TESSERA_RETURN_IF_ERROR(launch_convert(kernel, a, stream));
    if (!kernel.tile.sums_dbias) {
      TESSERA_RETURN_IF_ERROR(
          launch_dbias(problem, buffers, device, a, tile.tile_m, of_others.dbias));
    }
    return launch_dsink(a, tile.tile_m, stream);
  }

 private:
  static constexpr int kRowThreads = 128;

  // Pieces of the workspace that `a` does not hold, since it is others who fill them.
  struct OfOthers {
    void *mask, *dbias;
  };

  // All but maps and workspace. As much of it as the workspace depends on is the same for all
  // buffers. It fills what it is given: as a result, it would pass through a temporary object that
  // g++ 12 does not align for tensor maps.
  void set_problem(const BackwardKernel& kernel, const Problem& problem, const Buffers& buffers,
                   BackwardParams& a) const {
    a.problem = params_of(problem, buffers);
    a.in_quads = kernel.code->in_quads;
    a.has_factors = kernel.tile.fp8;
    a.reach_q = reach_of(is_ragged_q(problem), a.problem.sq);
    a.reach_k = reach_of(is_ragged_k(problem), a.problem.sk);
    const Sizes s = sizes_of(problem);
    a.slots = num_slots(is_thd_q(problem), static_cast<int>(s.sq),
                        static_cast<int>(std::max<int64_t>(s.batch, 1)), kernel.tile.tile_m);
    order_tiles(kernel, problem, most_queries(problem), multiprocessors_, orders_, a);
  }

  static Status set_maps(const BackwardKernel& kernel, const Problem& problem,
                         const Buffers& buffers, BackwardParams& a) {
    const BackwardTile& tile = kernel.tile;
    const auto map = [&](int index, int box_rows, int reach, CUtensorMap* to) {
      return map_of(problem, buffers, index, box_rows, reach, to);
    };
    TESSERA_RETURN_IF_ERROR(map(TESSERA_Q, tile.tile_m, a.reach_q, &a.q));
    TESSERA_RETURN_IF_ERROR(map(TESSERA_DO, tile.tile_m, a.reach_q, &a.grad_o));
    const int keys_of_cta = tile.tile_n() / tile.ctas();
    TESSERA_RETURN_IF_ERROR(map(TESSERA_K, keys_of_cta, a.reach_k, &a.k));
    if (!tile.fp8) {
      TESSERA_RETURN_IF_ERROR(map(TESSERA_O, tile.tile_m, a.reach_q, &a.o));
      TESSERA_RETURN_IF_ERROR(map(TESSERA_V, keys_of_cta, a.reach_k, &a.v));
    }
    for (const auto& [index, to] : {std::pair{TESSERA_DK, &a.grad_k}, {TESSERA_DV, &a.grad_v}}) {
      if (given(problem, index)) {
        TESSERA_RETURN_IF_ERROR(map(index, kRowsOfWarp, 0, to));
      }
    }
    if (!kernel.tile.sums_dbias) return {};
    return map_of_bias(problem, buffers, TESSERA_DBIAS, tile.tile_m, &a.grad_bias);
  }

  // E4M3 is dense, and its rows are padded; scales that kernels look up, and rows that they load.
  static Status set_rounded(const BackwardKernel& kernel, const Problem& problem,
                            const Rounded& rounded, RoundedBackwardParams& a) {
    const auto map = [&](int index, const uint8_t* base, int box_rows, int reach, CUtensorMap* to) {
      constexpr int64_t kPadding = 16;
      const Tensor& t = problem.tensor[index];
      MapShape shape = shape_of(t, box_rows, reach);
      shape.head_dim = (t.extent[3] + kPadding - 1) / kPadding * kPadding;
      shape.stride_head = shape.head_dim;
      shape.stride_row = shape.heads * shape.stride_head;
      shape.stride_batch = shape.rows * shape.stride_row;
      return make_tensor_map(in_pairs(shape), base, to);
    };
    const BackwardTile& tile = kernel.tile;
    TESSERA_RETURN_IF_ERROR(map(TESSERA_Q, rounded.q, tile.tile_m, a.reach_q, &a.q8));
    TESSERA_RETURN_IF_ERROR(map(TESSERA_DO, rounded.grad_o, tile.tile_m, a.reach_q, &a.grad_o8));
    TESSERA_RETURN_IF_ERROR(map(TESSERA_K, rounded.k, tile.tile_n(), a.reach_k, &a.k8));
    TESSERA_RETURN_IF_ERROR(map(TESSERA_V, rounded.v, tile.tile_n(), a.reach_k, &a.v8));
    a.rounded_grad_o = rounded.grad_o;
    a.q_scale = rounded.q_scale, a.do_scale = rounded.do_scale;
    a.k_scale = rounded.k_scale, a.v_scale = rounded.v_scale;
    a.row = rounded.row;
    a.key_slots = rounded.key_slots;
    return {};
  }

  // Points `a`, of ordered_params(), to its pieces.
  static OfOthers take_workspace(const BackwardKernel& kernel, const Problem& problem,
                                 Workspace& workspace, BackwardParams& a) {
    constexpr int kAlignment = 16;  // of what is copied or added to by vectors
    const Sizes s = sizes_of(problem);
    const BackwardTile& tile = kernel.tile;
    const Count slots = Count{s.hq} * a.slots;
    const int statistics = tile.fp8 ? 2 * tile.tile_m : tile.tile_m;
    a.lse2 = workspace.take<float>(slots * statistics);
    a.delta = workspace.take<float>(slots * statistics);
    if (given(problem, TESSERA_KEY_RANGES) || given(problem, TESSERA_SEGMENT_IDS_Q)) {
      a.hulls = workspace.take<QueryHull>(slots);
    }
    if (kernel.features & kSegments) take_segments(tile, workspace, a);
    OfOthers of_others{};
    of_others.mask =
        workspace.take<char>(given(problem, TESSERA_MASK)
                                 ? packed_backward_mask_bytes(problem.tensor[TESSERA_MASK], tile)
                                 : 0,
                             kAlignment);
    if (given(problem, TESSERA_DQ)) {
      a.dq_sums = workspace.take<float>(slots * tile.sums_of_dq(), kAlignment);
    }
    a.order = workspace.take<TurnOrder>(1);
    // A counter for each slot and CTA of a cluster, or two for each key head of the batch.
    const Count counters = tile.deterministic ? tile.ctas() * slots : 2 * Count{s.batch} * s.hk;
    a.turns = a.counts = workspace.take<int>(counters);
    const Count blocks = s.hq * Count{s.sq}.pieces(tile.tile_m);
    const int64_t tiles = (s.sk + tile.tile_n() - 1) / tile.tile_n();
    a.bias_marks = workspace.take<int>(tile.sums_dbias ? blocks * tiles * BackwardTile::kOwners : 0,
                                       kAlignment);
    const SharedCounts shared = shared_counts(kernel, a);
    a.key_tiles = workspace.take<int2>(a.ordered_slots);
    a.part_sums = workspace.take<float>(shared.sums, kAlignment);
    a.arrivals = workspace.take<int>(shared.arrivals);
    of_others.dbias = workspace.take<char>(dbias_workspace_bytes(problem));
    return of_others;
  }

  // Spans of the keys; and who comes when, which is read where all sequences are on the diagonal.
  static void take_segments(const BackwardTile& tile, Workspace& workspace, BackwardParams& a) {
    const Params& p = a.problem;
    a.spans = workspace.take<int2>(Count{p.sk} * (p.thd_k ? 1 : std::max<int64_t>(p.batch, 1)));
    a.span_slots = num_tile_slots(p.thd_k, p.sk, p.batch, tile.tile_m);
    int* const orders = workspace.take<int>(a.slots);
    const bool on_diagonal =
        p.sq == p.sk && p.window.right == 0 && p.shift == 0 && !p.has_positions;
    if (!a.reach_q && !a.reach_k && on_diagonal) a.orders = orders;
  }

  // Converts the sums of all heads, or of those whose sums no tile converts.
  Status launch_convert(const BackwardKernel& kernel, const BackwardParams& a,
                        cudaStream_t stream) const {
    const Params& p = a.problem;
    const BackwardTile& tile = kernel.tile;
    const bool by_tiles = a.ahead > 0 && tiles_convert(tile);  // of all but the last section
    const int slots = num_tile_slots(p.thd_q, p.sq, by_tiles ? 1 : p.batch, tile.tile_m);
    const int heads = by_tiles ? a.heads_of_last.divisor * p.group : p.hq,
              parts = tile.parts_of_dq();
    const bool spreads =
        int64_t{slots} * heads * parts <= int64_t{kCtasOfSpread} * multiprocessors_;
    return launch(kernel.name, kernel.code->convert,
                  dim3(static_cast<unsigned>(slots), static_cast<unsigned>(heads),
                       static_cast<unsigned>(spreads ? parts : 1)),
                  kRowThreads, spreads ? kSpreadingBytes : 0, a, stream);
  }

  static Status launch(const char* name, const void* function, dim3 grid, int threads,
                       int shared_bytes, const BackwardParams& a, cudaStream_t stream) {
    return launch_overlapping(name, function, grid, threads, shared_bytes, &a, stream);
  }

  int multiprocessors_;
  TileOrders orders_;
};

class BackwardPlan final : public Plan {
 public:
  BackwardPlan(int multiprocessors, std::unique_ptr<Plan> fallback)
      : multiprocessors_(multiprocessors),
        fused_(multiprocessors),
        fallback_(std::move(fallback)) {}

  int64_t workspace_bytes(const Problem& problem, int num_threads) const override {
    const ApartKernels* kernels = choose_apart_kernels(problem, multiprocessors_);
    const int64_t bytes = kernels
                              ? apart_workspace_bytes(*kernels, problem)
                              : fused_.workspace_bytes(choose_backward_kernel(problem), problem);
    return std::max(bytes, fallback_->workspace_bytes(problem, num_threads));
  }

  Status run(const Problem& problem, const Buffers& buffers, const Device& device) const override {
    if (!takes(problem, buffers)) return fallback_->run(problem, buffers, device);
    const DeviceScope scope(device.ordinal);
    TESSERA_RETURN_IF_ERROR(scope.status());
    const auto stream = static_cast<cudaStream_t>(buffers.stream);
    TESSERA_RETURN_IF_ERROR(report_checks(problem, buffers, stream));
    if (const ApartKernels* kernels = choose_apart_kernels(problem, multiprocessors_)) {
      return run_apart(*kernels, multiprocessors_, problem, buffers);
    }
    return fused_.run(choose_backward_kernel(problem), problem, buffers, device, buffers.workspace);
  }

 private:
  // Strides are rules of support; addresses and the cap are only known now.
  static bool takes(const Problem& problem, const Buffers& buffers) {
    constexpr int kBias[] = {TESSERA_BIAS}, kGradient[] = {TESSERA_DBIAS};
    return can_address(problem, buffers, kTensors) && can_cap(problem, buffers) &&
           (!copies_bias(problem) || can_address(problem, buffers, kBias)) &&
           (!sums_bias(problem) || can_address(problem, buffers, kGradient));
  }

  int multiprocessors_;
  FusedBackward fused_;
  std::unique_ptr<Plan> fallback_;
};

class RoundedBackwardPlan final : public RoundedBackward {
 public:
  explicit RoundedBackwardPlan(const Device& device, int multiprocessors)
      : device_(device), fused_(multiprocessors) {}

  int64_t workspace_bytes(const Problem& problem) const override {
    return fused_.workspace_bytes(rounded_backward_kernel(problem), problem);
  }
  bool takes(const Problem& problem, const Buffers& buffers) const override {
    return can_address(problem, buffers, kTensors);
  }
  Status run(const Problem& problem, const Buffers& buffers, const Rounded& rounded,
             void* workspace) const override {
    return fused_.run(rounded_backward_kernel(problem), problem, buffers, device_, workspace,
                      &rounded);
  }

 private:
  Device device_;
  FusedBackward fused_;
};

// Lets the kernels of a row have the shared memory that they ask for.
Status prepare(const BackwardKernel& kernel) {
  for (const auto& [function, bytes] :
       {std::pair{kernel.code->rows, kernel.code->rows_shared_bytes},
        {kernel.code->gradients, kernel.code->shared_bytes},
        {kernel.code->convert, kSpreadingBytes}}) {
    TESSERA_RETURN_IF_ERROR(cuda_status(
        cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
        "cudaFuncSetAttribute"));
  }
  return {};
}

}  // namespace

Result<std::unique_ptr<Plan>> plan_backward(const Problem& canonical, const Device& device,
                                            std::unique_ptr<Plan> fallback) {
  const Sizes s = sizes_of(canonical);
  const int dtype = canonical.tensor[TESSERA_Q].dtype;
  const DeviceScope scope(device.ordinal);
  TESSERA_RETURN_IF_ERROR(scope.status());
  // Which features a call has is not part of a plan.
  for (unsigned i = 0; i < 4 * (kSegments + 1); ++i) {
    const BackwardNeeds needs{i / 4, i % 2 > 0, i % 4 > 1};
    const BackwardKernel* kernel = find_backward_kernel(dtype, s.dqk, s.dv, needs);
    if (!kernel) continue;  // require_backward() refuses such calls
    TESSERA_RETURN_IF_ERROR(prepare(*kernel));
  }
  if (const ApartKernels* kernels = find_apart_kernels(dtype, s.dqk, s.dv)) {
    TESSERA_RETURN_IF_ERROR(prepare_apart(*kernels));
  }
  TESSERA_RETURN_IF_ERROR(prepare_dbias(dtype, s.dqk, s.dv));
  const Result<DeviceInfo> info = device_info(device.ordinal);
  TESSERA_RETURN_IF_ERROR(info.status());
  return std::unique_ptr<Plan>(
      std::make_unique<BackwardPlan>(info.value().multiprocessors, std::move(fallback)));
}

Result<std::unique_ptr<RoundedBackward>> plan_rounded_backward(const Problem& canonical,
                                                               const Device& device) {
  const DeviceScope scope(device.ordinal);
  TESSERA_RETURN_IF_ERROR(scope.status());
  TESSERA_RETURN_IF_ERROR(prepare(rounded_backward_kernel(canonical)));
  const Result<DeviceInfo> info = device_info(device.ordinal);
  TESSERA_RETURN_IF_ERROR(info.status());
  return std::unique_ptr<RoundedBackward>(
      std::make_unique<RoundedBackwardPlan>(device, info.value().multiprocessors));
}

}  // namespace tessera::cuda::sm90
