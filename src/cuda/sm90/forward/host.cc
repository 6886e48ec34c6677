// SPDX-License-Identifier: Apache-2.0
// The host side of the forward pass: tensor maps, the order of tiles, the launch.
#include <algorithm>
#include <bit>
#include <climits>

#include "core/log.h"
#include "core/workspace.h"
#include "cuda/common/checks.h"
#include "cuda/common/launch.h"
#include "cuda/common/merge/merge.h"
#include "cuda/common/sequence.cuh"
#include "cuda/common/work/mark.h"
#include "cuda/sm90/forward/pages/params.h"
#include "cuda/sm90/forward/score/pack_mask.h"
#include "cuda/sm90/forward/score/segments.h"
#include "cuda/sm90/machine/boxes.h"
#include "cuda/sm90/machine/tensormap.h"
#include "cuda/sm90/plan.h"

namespace tessera::cuda::sm90 {
namespace {

constexpr int kRowsOfConsumer = 64;
constexpr int kUnit = 16;  // bytes of an access
// Heads that stand side by side in the order of tiles: as many as have the keys and values that a
// row sees in this much of the L2 (docs/lab/2026-11-22-sm90-forward.md). Few heads would keep too
// many of the long tiles in few hands where CTAs ask for tiles long before they need them.
constexpr int64_t kL2Bytes = 16 << 20, kL2BytesAskingEarly = 32 << 20;
constexpr int64_t kHeadsAskingEarly = 32;
constexpr const char* kLeaves = "cuda_sm90 leaves this call to cuda_sm80:";

class ForwardPlan final : public Plan {
 public:
  ForwardPlan(int multiprocessors, std::unique_ptr<Plan> fallback)
      : multiprocessors_(multiprocessors), fallback_(std::move(fallback)) {}

  int64_t workspace_bytes(const Problem& problem, int num_threads) const override {
    // Whether TMA can read a bias is known with its address.
    const void* const misaligned = reinterpret_cast<const void*>(1);
    int64_t most = fallback_->workspace_bytes(problem, num_threads);
    for (const void* bias : {static_cast<const void*>(nullptr), misaligned}) {
      Workspace workspace;
      const ForwardKernel& tall = tall_kernel_of(problem, bias, 1);
      take_workspace(problem, tall.tile, parts_for(problem, tall), workspace);
      if (const DecodeKernel* steps = reads_pages(problem) ? kernel_of_steps(problem) : nullptr) {
        take_workspace_of_steps(problem, *steps, multiprocessors_, workspace);
      }
      most = std::max(most, workspace.bytes());
    }
    return most;
  }

  Status run(const Problem& problem, const Buffers& buffers, const Device& device) const override {
    if (!takes_call(problem, buffers)) return fallback_->run(problem, buffers, device);
    const DeviceScope scope(device.ordinal);
    TESSERA_RETURN_IF_ERROR(scope.status());
    const auto stream = static_cast<cudaStream_t>(buffers.stream);
    TESSERA_RETURN_IF_ERROR(report_checks(problem, buffers, stream));
    PagedForwardParams a{forward_params(problem, buffers)};
    const ForwardKernel& tall =
        tall_kernel_of(problem, buffers.data[TESSERA_BIAS], a.problem.softmax_scale);
    const ForwardKernel& kernel = with_rows(a.problem, tall, multiprocessors_);
    TESSERA_RETURN_IF_ERROR(map_of(problem, buffers, TESSERA_Q, rows_of_box(kernel.tile), 0, &a.q));
    TESSERA_RETURN_IF_ERROR(map_keys(problem, buffers, kernel.tile, a));
    if (kernel.tile.o_by_tma) {
      const int reach = reach_of(a.problem.thd_q, a.problem.sq), rows = rows_of_box(kernel.tile);
      TESSERA_RETURN_IF_ERROR(map_of(problem, buffers, TESSERA_O, rows, reach, &a.o));
    }
    Workspace workspace(buffers.workspace);
    const int parts = parts_of_tile(a.problem, kernel.tile, multiprocessors_);
    const Pieces pieces = take_workspace(problem, kernel.tile, parts, workspace);
    const DecodeKernel* const steps = kernel.tile.pages ? kernel_of_steps(problem) : nullptr;
    if (steps) a.step_queries = static_cast<int>(queries_of_step(problem, *steps));
    const int workers = multiprocessors_for(buffers, multiprocessors_) * kernel.tile.ctas;
    order_tiles(kernel.tile.tile_m(), workers, pieces.counter, a, true, kernel.tile.heads);
    if (given(problem, TESSERA_BIAS)) {
      TESSERA_RETURN_IF_ERROR(map_bias(problem, buffers, kernel, a));
    }
    if (given(problem, TESSERA_MASK)) {
      TESSERA_RETURN_IF_ERROR(
          pack_mask(problem.tensor[TESSERA_MASK], kernel.tile, pieces.mask, a, stream));
    }
    if (given(problem, TESSERA_SEGMENT_IDS_Q)) {
      TESSERA_RETURN_IF_ERROR(find_segments(problem, kernel.tile, kernel.features == kMasks,
                                            pieces.segments, a, stream));
    }
    TESSERA_RETURN_IF_ERROR(clear_max_logit(a, stream));
    const PartsMerge merge = cut_into_parts(pieces, parts, workers, a);
    const int64_t ctas = std::min<int64_t>(int64_t{a.tiles} * parts, workers);
    TESSERA_RETURN_IF_ERROR(
        launch_overlapping(kernel.name, kernel.code->function, dim3(static_cast<unsigned>(ctas)),
                           kernel.tile.threads(), kernel.code->shared_bytes, &a, stream));
    if (parts > 1) TESSERA_RETURN_IF_ERROR(launch_merge(merge, true, stream));
    return steps ? run_steps(problem, buffers, *steps, multiprocessors_, workspace) : Status();
  }

 private:
  // Rows of a head that TMA brings at a time.
  static int rows_of_box(const ForwardTile& tile) {
    return std::min(kRowsOfConsumer, tile.tile_m());
  }

  // What a call of these shapes has, whatever its addresses.
  int parts_for(const Problem& problem, const ForwardKernel& tall) const {
    const Params p = params_of(problem, nominal_buffers(problem));
    return parts_of_tile(p, with_rows(p, tall, multiprocessors_).tile, multiprocessors_);
  }

  struct Pieces {
    TileCounter* counter;
    void *mask, *segments;
    float *part_o, *part_lse;  // [parts, rows of q, hq, dv], [parts, rows of q, hq]; null: no parts
  };
  static Pieces take_workspace(const Problem& problem, const ForwardTile& tile, int parts,
                               Workspace& workspace) {
    Pieces pieces{workspace.take<TileCounter>(1), nullptr, nullptr, nullptr, nullptr};
    if (parts > 1) {
      const Sizes s = sizes_of(problem);
      const Count rows = parts * Count{problem.tensor[TESSERA_Q].extent[0]} * s.sq * s.hq;
      pieces.part_o = workspace.take<float>(rows * s.dv, kUnit);
      pieces.part_lse = workspace.take<float>(rows);
    }
    if (given(problem, TESSERA_MASK)) {
      pieces.mask = workspace.take<char>(packed_mask_bytes(problem.tensor[TESSERA_MASK], tile));
    }
    if (given(problem, TESSERA_SEGMENT_IDS_Q)) {
      pieces.segments = workspace.take<char>(segment_bytes(problem, tile));
    }
    return pieces;
  }

  static PagedForwardParams::Pool pool_of(const View& pool) {
    const int64_t elements = kUnit / size_of(pool.dtype);
    return {static_cast<uint32_t>(pool.stride[0] / elements),
            static_cast<uint32_t>(pool.stride[1] / elements)};
  }

  static Status map_keys(const Problem& problem, const Buffers& buffers, const ForwardTile& tile,
                         PagedForwardParams& a) {
    int box_rows = tile.tile_n;
    if (tile.pages) {
      a.box_keys = keys_of_boxes(problem, tile);
      box_rows = std::max(a.box_keys, 1);
      a.page_size = Divisor::of(a.problem.page_size);
      a.box_shift = std::countr_zero(static_cast<unsigned>(tile.tile_n / box_rows));
      a.reach_v = a.problem.page_size;
      a.keys = pool_of(a.problem.tensor[TESSERA_K]);
      a.values = pool_of(a.problem.tensor[TESSERA_V]);
      View& table = a.problem.tensor[TESSERA_PAGE_TABLE_V];
      if (!table.data) table = a.problem.tensor[TESSERA_PAGE_TABLE_K];
    }
    if (tile.e4m3) return {};  // no boxes
    TESSERA_RETURN_IF_ERROR(map_of(problem, buffers, TESSERA_K, box_rows, 0, &a.k));
    return map_of(problem, buffers, TESSERA_V, box_rows, a.reach_v, &a.v);
  }

  // Lets each part of a tile have an o and an lse of its own. Returns what makes one of them.
  static PartsMerge cut_into_parts(const Pieces& pieces, int parts, int workers,
                                   PagedForwardParams& a) {
    a.parts = Divisor::of(parts);
    if (parts == 1) return {};
    Params& p = a.problem;
    const auto merge = PartsMerge::of(p, parts, pieces.part_o, pieces.part_lse);
    a.part_lse = merge.rows;
    a.part_o = a.part_lse * p.dv;
    const MergePart first = merge.first();
    p.tensor[TESSERA_O] = first.o;
    p.tensor[TESSERA_LSE] = first.lse;
    a.counter = int64_t{a.tiles} * parts > workers ? pieces.counter : nullptr;
    return merge;
  }

  static Status map_bias(const Problem& problem, const Buffers& buffers,
                         const ForwardKernel& kernel, ForwardParams& a) {
    if (!(kernel.features & kBias) || !maps_bias(problem, buffers.data[TESSERA_BIAS])) return {};
    const Tensor& bias = problem.tensor[TESSERA_BIAS];
    a.bias_in_tiles = true;
    a.bias_columns = static_cast<int>(bias.extent[3]);
    a.bias_factor_batch = bias.extent[0] > 1 && bias.stride[0] > 0;
    a.bias_factor_head = bias.extent[1] > 1 && bias.stride[1] > 0;
    return map_of_bias(problem, buffers, TESSERA_BIAS, kRowsOfConsumer, &a.bias);
  }

  int multiprocessors_;
  std::unique_ptr<Plan> fallback_;
};

}  // namespace

bool takes_call(const Problem& problem, const Buffers& buffers) {
  constexpr int kTensors[] = {TESSERA_Q, TESSERA_K, TESSERA_V, TESSERA_O};
  if (!can_address(problem, buffers, kTensors) || !can_cap(problem, buffers)) return false;
  const double scale = softmax_scale_of(problem, buffers);
  if (!is_steep(scale)) return true;
  if (log_enabled(Topic::kDispatch)) {
    log(Topic::kDispatch, "%s softmax_scale=%g: is too large", kLeaves, scale);
  }
  return false;
}

bool can_cap(const Problem& problem, const Buffers& buffers) {
  const double softcap = softcap_of(problem, buffers);
  if (!is_large_cap(softcap)) return true;
  if (log_enabled(Topic::kDispatch)) {
    log(Topic::kDispatch, "%s softcap=%g: is too large", kLeaves, softcap);
  }
  return false;
}

bool can_address(const Problem& problem, const Buffers& buffers, std::span<const int> indices) {
  const Unaddressable first = first_unaddressable(problem, buffers, indices);
  if (!first.rule) return true;
  if (log_enabled(Topic::kDispatch)) {
    log(Topic::kDispatch, "%s %s=%p: %s; %s", kLeaves, first.name, first.address, first.rule,
        to_case(problem).c_str());
  }
  return false;
}

ForwardParams forward_params(const Problem& problem, const Buffers& buffers) {
  ForwardParams a{};
  a.problem = params_of(problem, buffers);
  a.reach_v = reach_of(is_ragged_k(problem), a.problem.sk);
  return a;
}

Status clear_max_logit(const ForwardParams& a, cudaStream_t stream) {
  const View& max_logit = a.problem.tensor[TESSERA_MAX_LOGIT];
  if (!max_logit.data) return {};
  return launch_fill(static_cast<float*>(max_logit.data), max_logit.stride[0], a.problem.hq,
                     -__builtin_huge_valf(), stream);
}

void order_tiles(int tile_m, int workers, TileCounter* counter, ForwardParams& a, bool asks_late,
                 int heads_of_tile) {
  const Params& p = a.problem;
  const int tiles_m = (p.sq + tile_m - 1) / tile_m;
  const int heads_of_sequence = p.hq / heads_of_tile;
  const int heads = p.batch * heads_of_sequence;
  a.tiles = num_tile_slots(p.thd_q, p.sq, p.batch, tile_m) * heads_of_sequence;
  a.longest_first = p.window.right >= 0;
  const int64_t bytes = asks_late ? kL2Bytes : kL2BytesAskingEarly;
  const int64_t keys = bytes * (p.group / heads_of_tile) / (int64_t{2} * (p.dqk + p.dv));
  a.keys_per_section = static_cast<int>(std::min<int64_t>(keys, INT_MAX));
  const bool is_window = asks_late && p.window.left >= 0 && p.window.right >= 0;
  const int64_t seen =
      std::min<int64_t>(p.sk, is_window ? int64_t{p.window.left} + p.window.right + 1 : p.sk);
  const int64_t most =
      std::min<int64_t>(std::max(keys / seen, asks_late ? 1 : kHeadsAskingEarly), heads);
  int per_section = divisor_up_to(heads, static_cast<int>(most));
  if (int64_t{per_section} * tiles_m < workers) {
    // Not a tile for each: rather too many heads than too few.
    per_section = divisor_from(heads, static_cast<int>(most));
  }
  a.tiles_m = Divisor::of(tiles_m);
  a.heads = Divisor::of(heads_of_sequence);
  a.heads_per_section = Divisor::of(per_section);
  // Sections are of dense problems; tiles_m counts the rows of all packed sequences.
  a.per_section = Divisor::of(p.thd_q ? 1 : per_section * tiles_m);
  a.counter = a.tiles > workers ? counter : nullptr;
  a.mark = next_mark();
}

Result<std::unique_ptr<Plan>> plan_forward(const Problem& canonical, const Device& device,
                                           std::unique_ptr<Plan> fallback) {
  const Sizes s = sizes_of(canonical);
  const int dtype = canonical.tensor[TESSERA_Q].dtype;
  const Result<DeviceInfo> info = device_info(device.ordinal);
  if (!info.ok()) return info.status();
  const DeviceScope scope(device.ordinal);
  TESSERA_RETURN_IF_ERROR(scope.status());
  constexpr ForwardNeeds kNeeds[] = {{kAlibi}, {kSoftcap},    {kDropout},         {kMasks},
                                     {kBias},  {kEverything}, {kEverything, true}};
  const auto prepare = [](const ForwardKernel* kernel) -> Status {
    if (!kernel) return {};
    return cuda_status(
        cudaFuncSetAttribute(kernel->code->function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             kernel->code->shared_bytes),
        "cudaFuncSetAttribute");
  };
  const auto prepare_rows = [&](const ForwardNeeds& needs) -> Status {
    for (const int consumers : {3, kConsumersOfLowTile, kConsumersOfLoneTile}) {
      TESSERA_RETURN_IF_ERROR(prepare(find_forward_kernel(needs, dtype, s.dqk, s.dv, consumers)));
    }
    return {};
  };
  for (const ForwardNeeds& needs : kNeeds) TESSERA_RETURN_IF_ERROR(prepare_rows(needs));
  for (int heads = 1; heads <= kMostHeadsOfTile; heads *= 2) {
    for (const bool pages : {false, true}) {
      for (const bool parts : {false, true}) {
        TESSERA_RETURN_IF_ERROR(
            prepare_rows({.features = kLean, .pages = pages, .heads = heads, .parts = parts}));
      }
    }
  }
  TESSERA_RETURN_IF_ERROR(prepare_rows({.features = kLean, .pages = true, .e4m3 = true}));
  TESSERA_RETURN_IF_ERROR(prepare(kernel_of_more_columns(dtype, s.dqk, s.dv)));
  return std::unique_ptr<Plan>(
      std::make_unique<ForwardPlan>(info.value().multiprocessors, std::move(fallback)));
}

}  // namespace tessera::cuda::sm90
