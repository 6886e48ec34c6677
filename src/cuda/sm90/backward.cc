// SPDX-License-Identifier: Apache-2.0
// The host side of the backward pass: workspace, tensor maps, the order of tiles, three launches.
#include <algorithm>

#include "cuda/common/checks.h"
#include "cuda/common/launch.h"
#include "cuda/sm90/backward_choice.h"
#include "cuda/sm90/backward_pack_mask.h"
#include "cuda/sm90/backward_sink.h"
#include "cuda/sm90/dbias.h"
#include "cuda/sm90/plan.h"
#include "cuda/sm90/tensormap.h"

namespace tessera::cuda::sm90 {
namespace {

constexpr int kTensors[] = {TESSERA_Q,  TESSERA_K,  TESSERA_V,  TESSERA_O,
                            TESSERA_DO, TESSERA_DQ, TESSERA_DK, TESSERA_DV};

// What q, do and the sums of the heads in flight may take of 50 MB of L2; and in a fixed order,
// where tiles wait less if more heads stand side by side.
constexpr int64_t kL2Bytes = 32 << 20, kL2BytesInTurn = 48 << 20;
constexpr int kMostInTurn = 8;

// The last kernel of a call that is over in microseconds has a CTA for each part of a block. While
// tiles run there is room on few multiprocessors, where all of them would settle: shared memory
// that nobody uses keeps them to so many each.
constexpr int kCtasOfSpread = 4, kSpreadingBytes = (200 << 10) / kCtasOfSpread;

class BackwardPlan final : public Plan {
 public:
  BackwardPlan(int multiprocessors, std::unique_ptr<Plan> fallback)
      : multiprocessors_(multiprocessors), fallback_(std::move(fallback)) {}

  int64_t workspace_bytes(const Problem& problem, int num_threads) const override {
    const TwoKernels* kernels = choose_two_kernels(problem, multiprocessors_);
    const int64_t bytes = kernels ? two_workspace_bytes(*kernels, problem)
                                  : workspace_of(problem, choose_backward_kernel(problem)).bytes;
    return std::max(bytes, fallback_->workspace_bytes(problem, num_threads));
  }

  Status run(const Problem& problem, const Buffers& buffers, const Device& device) const override {
    if (!aligned(problem, buffers)) return fallback_->run(problem, buffers, device);
    const DeviceScope scope(device.ordinal);
    TESSERA_RETURN_IF_ERROR(scope.status());
    const auto stream = static_cast<cudaStream_t>(buffers.stream);
    TESSERA_RETURN_IF_ERROR(report_checks(problem, buffers, stream));
    if (const TwoKernels* kernels = choose_two_kernels(problem, multiprocessors_)) {
      return run_two(*kernels, multiprocessors_, problem, buffers);
    }
    const BackwardKernel& kernel = choose_backward_kernel(problem);
    const BackwardTile& tile = kernel.tile;
    const Workspace workspace = workspace_of(problem, kernel);
    auto* base = static_cast<char*>(buffers.workspace);
    BackwardParams a{};
    a.problem = params_of(problem, buffers);
    const Params& p = a.problem;
    a.in_quads = kernel.in_quads;
    TESSERA_RETURN_IF_ERROR(set_maps(kernel, problem, buffers, a));
    order_tiles(kernel, problem, a);
    set_workspace(kernel, workspace, base, a);
    if (runs_in_sections(kernel, a)) a.ahead = a.heads_per_section.divisor;
    if (given(problem, TESSERA_MASK)) {
      TESSERA_RETURN_IF_ERROR(
          pack_backward_mask(problem.tensor[TESSERA_MASK], tile, base + workspace.mask, a, stream));
    }

    const auto heads = static_cast<unsigned>(p.hq);
    TESSERA_RETURN_IF_ERROR(launch(kernel.rows, dim3(static_cast<unsigned>(a.slots), heads),
                                   kRowThreads, kernel.rows_shared_bytes, a, stream));
    TESSERA_RETURN_IF_ERROR(launch(kernel.gradients,
                                   dim3(static_cast<unsigned>(a.tiles * a.sequences * tile.ctas())),
                                   BackwardTile::kThreads, kernel.shared_bytes, a, stream));
    if (a.dq_sums) TESSERA_RETURN_IF_ERROR(launch_convert(kernel, a, stream));
    if (!(kernel.features & kGradientOfBias)) {
      TESSERA_RETURN_IF_ERROR(
          launch_dbias(problem, buffers, device, a, tile.tile_m, base + workspace.dbias));
    }
    return launch_dsink(a, tile.tile_m, stream);
  }

 private:
  static constexpr int kRowThreads = 128;
  static constexpr int64_t kBytesOfSum = 4;

  struct Workspace {
    int slots;
    bool has_hulls;
    int64_t delta, hulls, spans, orders, mask, dq_sums, order, turns, bias_marks, dbias,
        bytes;  // lse2 stands at 0
  };
  static Workspace workspace_of(const Problem& problem, const BackwardKernel& kernel) {
    const Sizes s = sizes_of(problem);
    const BackwardTile& tile = kernel.tile;
    Workspace w;
    w.slots = num_slots(is_thd_q(problem), static_cast<int>(s.sq),
                        static_cast<int>(std::max<int64_t>(s.batch, 1)), tile.tile_m);
    w.has_hulls = given(problem, TESSERA_KEY_RANGES) || given(problem, TESSERA_SEGMENT_IDS_Q);
    const int64_t slots = s.hq * w.slots;
    w.delta = slots * tile.tile_m * 4;
    w.hulls = 2 * w.delta;
    w.spans = w.hulls + (w.has_hulls ? slots * static_cast<int64_t>(sizeof(QueryHull)) : 0);
    const int64_t keys = s.sk * (is_thd_k(problem) ? 1 : std::max<int64_t>(s.batch, 1));
    w.orders = w.spans + (kernel.features & kSegments ? 8 * keys : 0);
    w.mask = (w.orders + (kernel.features & kSegments ? 4 * w.slots : 0) + 15) / 16 * 16;
    w.dq_sums = w.mask;
    if (given(problem, TESSERA_MASK)) {
      w.dq_sums += packed_backward_mask_bytes(problem.tensor[TESSERA_MASK], tile);
    }
    w.order =
        w.dq_sums + (given(problem, TESSERA_DQ) ? slots * tile.sums_of_dq() * kBytesOfSum : 0);
    w.turns = w.order + static_cast<int64_t>(sizeof(TurnOrder));
    // A counter for each slot and CTA of a cluster, or two for each key head of the batch.
    const int64_t counters =
        kernel.features & kDeterministic ? tile.ctas() * slots : 2 * s.batch * s.hk;
    w.bias_marks = (w.turns + counters * 4 + 15) / 16 * 16;
    w.dbias = w.bias_marks;
    if (kernel.features & kGradientOfBias) {
      const int64_t blocks = s.hq * ((s.sq + tile.tile_m - 1) / tile.tile_m);
      const int64_t tiles = (s.sk + tile.tile_n() - 1) / tile.tile_n();
      w.dbias += (blocks * tiles * BackwardTile::kOwners * 4 + 15) / 16 * 16;
    }
    w.bytes = w.dbias + dbias_workspace_bytes(problem);
    return w;
  }

  static Status set_maps(const BackwardKernel& kernel, const Problem& problem,
                         const Buffers& buffers, BackwardParams& a) {
    const BackwardTile& tile = kernel.tile;
    a.ragged_q = given(problem, TESSERA_SEQLENS_Q) || a.problem.thd_q;
    a.ragged_k = given(problem, TESSERA_SEQLENS_K) || a.problem.thd_k;
    const auto map = [&](int index, int box_rows, bool ragged, CUtensorMap* to) {
      return map_of(problem, buffers, index, box_rows, ragged, to);
    };
    TESSERA_RETURN_IF_ERROR(map(TESSERA_Q, tile.tile_m, a.ragged_q, &a.q));
    TESSERA_RETURN_IF_ERROR(map(TESSERA_O, tile.tile_m, a.ragged_q, &a.o));
    TESSERA_RETURN_IF_ERROR(map(TESSERA_DO, tile.tile_m, a.ragged_q, &a.grad_o));
    const int keys_of_cta = tile.tile_n() / tile.ctas();
    TESSERA_RETURN_IF_ERROR(map(TESSERA_K, keys_of_cta, a.ragged_k, &a.k));
    TESSERA_RETURN_IF_ERROR(map(TESSERA_V, keys_of_cta, a.ragged_k, &a.v));
    for (const auto& [index, to] : {std::pair{TESSERA_DK, &a.grad_k}, {TESSERA_DV, &a.grad_v}}) {
      if (given(problem, index)) {
        TESSERA_RETURN_IF_ERROR(map(index, kRowsOfWarp, false, to));
      }
    }
    if (!(kernel.features & kGradientOfBias)) return {};
    return map_of_bias(problem, buffers, TESSERA_DBIAS, tile.tile_m, &a.grad_bias);
  }

  // After order_tiles().
  static void set_workspace(const BackwardKernel& kernel, const Workspace& workspace, char* base,
                            BackwardParams& a) {
    const Params& p = a.problem;
    a.slots = workspace.slots;
    a.lse2 = reinterpret_cast<float*>(base);
    a.delta = reinterpret_cast<float*>(base + workspace.delta);
    if (workspace.has_hulls) a.hulls = reinterpret_cast<QueryHull*>(base + workspace.hulls);
    if (kernel.features & kSegments) {
      a.spans = reinterpret_cast<int2*>(base + workspace.spans);
      a.span_slots = num_tile_slots(p.thd_k, p.sk, p.batch, kernel.tile.tile_m);
      const bool on_diagonal = !a.ragged_q && !a.ragged_k && p.sq == p.sk && p.right == 0;
      if (on_diagonal) a.orders = reinterpret_cast<int*>(base + workspace.orders);
    }
    if (p.tensor[TESSERA_DQ].data) a.dq_sums = reinterpret_cast<float*>(base + workspace.dq_sums);
    a.order = reinterpret_cast<TurnOrder*>(base + workspace.order);
    a.turns = a.counts = reinterpret_cast<int*>(base + workspace.turns);
    a.bias_marks = reinterpret_cast<int*>(base + workspace.bias_marks);
  }

  // Strides are rules of support; addresses are only known now.
  static bool aligned(const Problem& problem, const Buffers& buffers) {
    uintptr_t bits = 0;
    for (const int index : kTensors) {
      if (given(problem, index)) bits |= reinterpret_cast<uintptr_t>(buffers.data[index]);
    }
    if (copies_bias(problem)) bits |= reinterpret_cast<uintptr_t>(buffers.data[TESSERA_BIAS]);
    if (sums_bias(problem)) bits |= reinterpret_cast<uintptr_t>(buffers.data[TESSERA_DBIAS]);
    return bits % 16 == 0;
  }

  void order_tiles(const BackwardKernel& kernel, const Problem& problem, BackwardParams& a) const {
    const Params& p = a.problem;
    const bool shares_bias =
        kernel.features & kGradientOfBias && problem.tensor[TESSERA_DBIAS].extent[0] == 1;
    a.sequences = shares_bias ? std::max(p.batch, 1) : 1;
    const int tile_n = kernel.tile.tile_n();
    const bool in_turn = kernel.features & kDeterministic;
    const int tiles_n = (p.sk + tile_n - 1) / tile_n;
    const int batch = p.batch / a.sequences, heads = batch * p.hk;
    a.tiles = num_tile_slots(p.thd_k, p.sk, batch, tile_n) * p.hk;
    a.longest_first = p.right >= 0 || in_turn;
    a.heads_inner = !swaps_loops(kernel.tile, kernel.features) || starts_in_step(p);
    const int group = a.heads_inner ? p.group : 1;  // heads that tiles are at together
    const int64_t bytes_of_head = int64_t{group} * p.sq * (2 * (p.dqk + p.dv) + 4 * p.dqk);
    const int64_t bytes_in_flight = !in_turn       ? kL2Bytes
                                    : p.right >= 0 ? kL2BytesInTurn
                                                   : 2 * kL2Bytes;
    int per_section = static_cast<int>(
        std::clamp<int64_t>(bytes_in_flight / std::max<int64_t>(bytes_of_head, 1), 1, heads));
    if (in_turn) {
      per_section = std::min({group > 1 ? kMostInTurn : per_section, kMostInTurn,
                              p.right >= 0 && group == 1 ? std::max(heads / 2, 1) : heads});
    }
    // Tiles that clear and convert for other sections leave least to the small kernels if sections
    // are short.
    const int heads_of_wave = std::clamp((multiprocessors_ + tiles_n / 2) / tiles_n, 1, heads);
    if (is_plain(kernel.tile, kernel.features)) per_section = heads_of_wave;
    if (!in_turn && p.right >= 0 && p.group > 1) {
      // Groups are large: their tiles stay in step. Those of a first section start together and
      // walk downwards; those of a second one start as the shortest of the first end, and walk
      // upwards: each begins at its diagonal when the one before comes by there.
      per_section = heads_of_wave;
      a.alternates = a.heads_inner && !p.thd_k;
    }
    // Tiles of documents read little: of more heads side by side the last ones are shorter.
    if (!in_turn && kernel.features & kSegments) per_section = std::min(4 * per_section, heads);
    while (heads % per_section != 0) --per_section;
    if (in_turn && p.right >= 0) {
      // The last section begins with its longest tiles, so that all CTAs end together. Tiles of
      // groups are long and few: all of them do. Where masks leave blocks out, none can.
      a.upward_sections = p.thd_k || kernel.features & (kMasks | kSegments) ? heads / per_section
                          : group == 1 ? heads / per_section - 1
                                       : 0;
    }
    a.tiles_n = Divisor::of(tiles_n);
    a.heads = Divisor::of(p.hk);
    a.heads_per_section = Divisor::of(per_section);
    a.per_section = Divisor::of(per_section * tiles_n);
  }

  // Whether tiles of a key head that start together come by the same blocks together: from the
  // first or the last one of the sequence on. Under a window, and where sections of tiles cannot
  // walk downwards, each starts two blocks on from the one before. Whoever takes all heads of a
  // group at a block then comes to what its neighbour has read when the L2 has lost it; of one
  // head after the other it is still there.
  static bool starts_in_step(const Params& p) {
    if (p.right < 0) return true;
    return !p.thd_k && (p.left < 0 || 2 * (int64_t{p.left} + p.right + 1) > p.sq);
  }

  // Sums are cleared and converted by tiles of other sections (backward_sections.cuh). Where
  // sections have few tiles and many queries each tile would have more to clear than the next can
  // wait for.
  bool runs_in_sections(const BackwardKernel& kernel, const BackwardParams& a) const {
    const Params& p = a.problem;
    return is_plain(kernel.tile, kernel.features) && a.dq_sums && p.tensor[TESSERA_DK].data &&
           p.tensor[TESSERA_DV].data && !p.thd_q && !p.thd_k && a.slots > 0 &&
           2 * a.per_section.divisor >= multiprocessors_ &&
           p.batch * p.hk >= 2 * a.heads_per_section.divisor;
  }

  // Of all heads, or of those whose sums no tile converts.
  Status launch_convert(const BackwardKernel& kernel, const BackwardParams& a,
                        cudaStream_t stream) const {
    const Params& p = a.problem;
    const BackwardTile& tile = kernel.tile;
    const bool by_tiles = a.ahead > 0 && tiles_convert(tile);  // all but the last section
    const int slots = num_tile_slots(p.thd_q, p.sq, by_tiles ? 1 : p.batch, tile.tile_m);
    const int heads = by_tiles ? a.ahead * p.group : p.hq, parts = tile.parts_of_dq();
    const bool spreads =
        int64_t{slots} * heads * parts <= int64_t{kCtasOfSpread} * multiprocessors_;
    return launch(kernel.convert,
                  dim3(static_cast<unsigned>(slots), static_cast<unsigned>(heads),
                       static_cast<unsigned>(spreads ? parts : 1)),
                  kRowThreads, spreads ? kSpreadingBytes : 0, a, stream);
  }

  static Status launch(const void* function, dim3 grid, int threads, int shared_bytes,
                       const BackwardParams& a, cudaStream_t stream) {
    return launch_overlapping("backward", function, grid, threads, shared_bytes, &a, stream);
  }

  int multiprocessors_;
  std::unique_ptr<Plan> fallback_;
};

}  // namespace

Result<std::unique_ptr<Plan>> plan_backward(const Problem& canonical, const Device& device,
                                            std::unique_ptr<Plan> fallback) {
  const Sizes s = sizes_of(canonical);
  const int dtype = canonical.tensor[TESSERA_Q].dtype;
  const DeviceScope scope(device.ordinal);
  TESSERA_RETURN_IF_ERROR(scope.status());
  // Which features a call has is not part of a plan.
  for (int features = 0; features <= kAllBits; ++features) {
    const BackwardKernel* kernel = find_backward_kernel(dtype, s.dqk, s.dv, features);
    if (!kernel) continue;  // require_backward() refuses such calls
    for (const auto& [function, bytes] : {std::pair{kernel->rows, kernel->rows_shared_bytes},
                                          {kernel->gradients, kernel->shared_bytes},
                                          {kernel->convert, kSpreadingBytes}}) {
      TESSERA_RETURN_IF_ERROR(cuda_status(
          cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
          "cudaFuncSetAttribute"));
    }
  }
  if (const TwoKernels* kernels = find_two_kernels(dtype, s.dqk, s.dv)) {
    TESSERA_RETURN_IF_ERROR(prepare_two(*kernels));
  }
  TESSERA_RETURN_IF_ERROR(prepare_dbias(dtype, s.dqk, s.dv));
  const Result<DeviceInfo> info = device_info(device.ordinal);
  TESSERA_RETURN_IF_ERROR(info.status());
  return std::unique_ptr<Plan>(
      std::make_unique<BackwardPlan>(info.value().multiprocessors, std::move(fallback)));
}

}  // namespace tessera::cuda::sm90
