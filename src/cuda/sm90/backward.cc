// SPDX-License-Identifier: Apache-2.0
// The host side of the backward pass: workspace, tensor maps, the order of tiles, three launches.
#include <algorithm>
#include <string>

#include "cuda/common/checks.h"
#include "cuda/common/launch.h"
#include "cuda/sm90/backward_kernels.h"
#include "cuda/sm90/backward_pack_mask.h"
#include "cuda/sm90/backward_sink.h"
#include "cuda/sm90/backward_two_plan.h"
#include "cuda/sm90/dbias.h"
#include "cuda/sm90/plan.h"
#include "cuda/sm90/tensormap.h"

namespace tessera::cuda::sm90 {
namespace {

constexpr int kTensors[] = {TESSERA_Q,  TESSERA_K,  TESSERA_V,  TESSERA_O,
                            TESSERA_DO, TESSERA_DQ, TESSERA_DK, TESSERA_DV};
constexpr int64_t kL2Bytes =
    32 << 20;  // what q, do and the sums of the heads in flight may take of 50 MB

// The deterministic form, whose tiles wait less where more heads stand side by side.
constexpr int64_t kL2BytesInTurn = 48 << 20;
constexpr int kMostInTurn = 8;

// Rows of 16-bit elements can be copied by 16 bytes, if the first one is aligned.
bool has_vectors(const Tensor& t) {
  for (int axis = 0; axis < 3; ++axis) {
    if (t.extent[axis] > 1 && t.stride[axis] % 8 != 0) return false;
  }
  return t.extent[3] > 1 && t.stride[3] == 1;
}

// Others need the kernel of all features. One row for all queries does too: asking the L2 for it
// again and again takes twice as long.
bool copies_bias(const Problem& p) {
  const Tensor& bias = p.tensor[TESSERA_BIAS];
  return given(p, TESSERA_BIAS) && bias.dtype == p.tensor[TESSERA_Q].dtype && has_vectors(bias) &&
         bias.extent[2] > 1 && bias.stride[2] != 0;
}

// Of enum BackwardFeature.
int features_of(const Problem& p) {
  const bool masks =
      given(p, TESSERA_MASK) || given(p, TESSERA_KEY_RANGES) || given(p, TESSERA_SEGMENT_IDS_Q);
  return (given(p, TESSERA_ALIBI_SLOPES) ? kAlibi : 0) | (has(p, TESSERA_SOFTCAP) ? kSoftcap : 0) |
         (has(p, TESSERA_DROPOUT) ? kDropout : 0) | (masks ? kMasks : 0) |
         (!given(p, TESSERA_BIAS) ? 0
          : copies_bias(p)        ? kBias
                                  : kEverything) |
         (has(p, TESSERA_DETERMINISTIC) ? kDeterministic : 0);
}

// A kernel of its own, where one is built for the head dims.
bool has_segments_alone(const Problem& p) {
  return given(p, TESSERA_SEGMENT_IDS_Q) && features_of(p) % kDeterministic == kMasks &&
         !given(p, TESSERA_MASK) && !given(p, TESSERA_KEY_RANGES);
}

// dbias can be summed by the kernel of dq, dk and dv: few sequences share an element, nothing but
// the band and the bias shapes a score, and that after the scale, so that dS is its gradient.
bool sums_bias(const Problem& p) {
  constexpr int kMostSequences = 2;  // sums grow in the dtype of dbias
  if (!given(p, TESSERA_DBIAS) || features_of(p) % kDeterministic != kBias ||
      has(p, TESSERA_BIAS_PRE_SCALE)) {
    return false;
  }
  const Sizes s = sizes_of(p);
  const Tensor& t = p.tensor[TESSERA_DBIAS];
  for (int axis = 0; axis < 3; ++axis) {
    if (t.extent[axis] > 1 && (t.stride[axis] <= 0 || t.stride[axis] >= kMostStride)) return false;
  }
  return t.dtype == p.tensor[TESSERA_Q].dtype && has_vectors(t) && !given(p, TESSERA_SEQLENS_Q) &&
         !given(p, TESSERA_SEQLENS_K) && !is_thd_q(p) && !is_thd_k(p) && t.extent[1] == s.hq &&
         t.extent[2] == s.sq && t.extent[3] == s.sk &&
         (t.extent[0] == s.batch || s.batch <= kMostSequences);
}

// The first row that holds the head dims and knows the features.
const BackwardKernel* find_backward_kernel(int dtype, int64_t dqk, int64_t dv, int features) {
  for (const BackwardKernel& kernel : backward_kernels()) {
    if (kernel.dtype == dtype && kernel.tile.dqk >= dqk && kernel.tile.dv >= dv &&
        (kernel.features & features) == features) {
      return &kernel;
    }
  }
  return nullptr;
}

bool is_causal(const Problem& p) {
  return has(p, TESSERA_WINDOW) && p.window_left < 0 && p.window_right == 0;
}

// Of packed sequences lengths are not known here; what is: the longest, if the caller says it or
// all tokens are few, and about how many tiles there are.
bool is_faster_apart_packed(const Problem& p, int multiprocessors) {
  constexpr int64_t kLong = 1024, kLongest = 2048, kRounds = 4, kTile = 128;
  if (!is_thd_q(p) || !is_thd_k(p)) return false;
  const Sizes s = sizes_of(p);
  const int64_t rows =
      std::max(has(p, TESSERA_MAX_SEQLEN_Q) ? std::min(p.max_seqlen_q, s.sq) : s.sq,
               has(p, TESSERA_MAX_SEQLEN_K) ? std::min(p.max_seqlen_k, s.sk) : s.sk);
  const int64_t tiles = (std::min(s.sq, s.sk) / kTile + s.batch) * s.hq;
  const bool longer = is_causal(p) && std::max(s.dqk, s.dv) <= 64;
  return rows <= (longer ? kLongest : kLong) && tiles >= kRounds * multiprocessors;
}

// Whether what a tile walks is short although the sequence is not: the band, when tiles are many.
bool is_narrow(const Problem& p, int64_t rows, int64_t tiles) {
  constexpr int64_t kBand = 640, kBandOfGroups = 1088, kManyTiles = 512;
  if (!has(p, TESSERA_WINDOW) || p.window_left < 0 || p.window_right < 0) return false;
  const int64_t band = std::min(p.window_left, rows) + std::min(p.window_right, rows) + 1;
  const Sizes s = sizes_of(p);
  const bool in_group = s.hq > s.hk && rows >= 3 * kBandOfGroups;
  return tiles >= kManyTiles && band <= (in_group ? kBandOfGroups : kBand);
}

// Two kernels that each own what they add up make seven products instead of five, but neither clear
// nor convert sums: faster where sequences or bands are short and their tiles either start at once
// or fill the GPU several times (docs/kernels/sm90_backward_two.md: what was measured).
bool is_faster_apart(const Problem& p, int multiprocessors) {
  constexpr int64_t kShort = 512, kLong = 1024, kLongest = 2048, kManyHeads = 128, kTile = 128;
  const Sizes s = sizes_of(p);
  const int64_t columns = std::max(s.dqk, s.dv), heads = s.batch * s.hk;
  const int64_t rows = std::max(s.sq, s.sk);
  if (columns > 64 && columns <= 96) return false;
  if (is_thd_q(p) || is_thd_k(p)) return is_faster_apart_packed(p, multiprocessors);
  // Of tiles without work a warp stores the zeros, one after the other.
  const bool many_empty = given(p, TESSERA_SEQLENS_Q) || given(p, TESSERA_SEQLENS_K);
  const int64_t tiles = (rows + kTile - 1) / kTile * s.batch * s.hq;
  if (!many_empty && is_narrow(p, rows, tiles)) return true;
  if (heads < kManyHeads) {
    return rows <= kShort && (has(p, TESSERA_DETERMINISTIC) || tiles <= multiprocessors);
  }
  if (many_empty) return false;
  return rows <= kLong || (rows <= kLongest && columns > 64 && is_causal(p));
}

// Null: the problem runs otherwise.
const TwoKernels* two_kernels_of(const Problem& p, int multiprocessors) {
  if (features_of(p) % kDeterministic != 0 || !given(p, TESSERA_DQ) || !given(p, TESSERA_DK) ||
      !given(p, TESSERA_DV) || !is_faster_apart(p, multiprocessors)) {
    return nullptr;
  }
  // dsink reads the statistics of every row, but of tiles that see no key there are none.
  const Sizes s = sizes_of(p);
  const bool sees = s.sq == s.sk && !is_thd_q(p) && !given(p, TESSERA_SEQLENS_Q) &&
                    !given(p, TESSERA_SEQLENS_K) && !(has(p, TESSERA_WINDOW) && p.window_left >= 0);
  if (given(p, TESSERA_DSINK) && !sees) return nullptr;
  return find_two_kernels(p.tensor[TESSERA_Q].dtype, s.dqk, s.dv);
}

class BackwardPlan final : public Plan {
 public:
  BackwardPlan(int multiprocessors, std::unique_ptr<Plan> fallback)
      : multiprocessors_(multiprocessors), fallback_(std::move(fallback)) {}

  int64_t workspace_bytes(const Problem& problem, int num_threads) const override {
    const TwoKernels* kernels = two_kernels_of(problem, multiprocessors_);
    const int64_t bytes = kernels ? two_workspace_bytes(*kernels, problem)
                                  : workspace_of(problem, kernel_of(problem)).bytes;
    return std::max(bytes, fallback_->workspace_bytes(problem, num_threads));
  }

  Status run(const Problem& problem, const Buffers& buffers, const Device& device) const override {
    if (!aligned(problem, buffers)) return fallback_->run(problem, buffers, device);
    const DeviceScope scope(device.ordinal);
    TESSERA_RETURN_IF_ERROR(scope.status());
    const auto stream = static_cast<cudaStream_t>(buffers.stream);
    TESSERA_RETURN_IF_ERROR(report_checks(problem, buffers, stream));
    if (const TwoKernels* kernels = two_kernels_of(problem, multiprocessors_)) {
      return run_two(*kernels, multiprocessors_, problem, buffers);
    }
    const BackwardKernel& kernel = kernel_of(problem);
    const BackwardTile& tile = kernel.tile;
    BackwardParams a{};
    a.problem = params_of(problem, buffers);
    const Params& p = a.problem;
    a.ragged_q = given(problem, TESSERA_SEQLENS_Q) || p.thd_q;
    a.ragged_k = given(problem, TESSERA_SEQLENS_K) || p.thd_k;
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
    const bool sums_bias = kernel.features & kGradientOfBias;
    if (sums_bias) {
      TESSERA_RETURN_IF_ERROR(
          map_of_bias(problem, buffers, TESSERA_DBIAS, tile.tile_m, &a.grad_bias));
    }
    a.sequences =
        sums_bias && problem.tensor[TESSERA_DBIAS].extent[0] == 1 ? std::max(p.batch, 1) : 1;
    order_tiles(kernel, a);
    const Workspace workspace = workspace_of(problem, kernel);
    auto* base = static_cast<char*>(buffers.workspace);
    a.slots = workspace.slots;
    a.in_quads = kernel.in_quads;
    a.lse2 = reinterpret_cast<float*>(base);
    a.delta = reinterpret_cast<float*>(base + workspace.delta);
    if (workspace.has_hulls) a.hulls = reinterpret_cast<QueryHull*>(base + workspace.hulls);
    if (kernel.features & kSegments) {
      a.spans = reinterpret_cast<int2*>(base + workspace.spans);
      a.span_slots = num_tile_slots(p.thd_k, p.sk, p.batch, tile.tile_m);
      const bool on_diagonal = !a.ragged_q && !a.ragged_k && p.sq == p.sk && p.right == 0;
      if (on_diagonal) a.orders = reinterpret_cast<int*>(base + workspace.orders);
    }
    if (given(problem, TESSERA_MASK)) {
      TESSERA_RETURN_IF_ERROR(
          pack_backward_mask(problem.tensor[TESSERA_MASK], tile, base + workspace.mask, a, stream));
    }
    if (p.tensor[TESSERA_DQ].data) a.dq_sums = reinterpret_cast<float*>(base + workspace.dq_sums);
    a.turns = reinterpret_cast<int*>(base + workspace.turns);
    a.order = reinterpret_cast<TurnOrder*>(base + workspace.order);
    a.bias_marks = reinterpret_cast<int*>(base + workspace.bias_marks);
    a.counts = a.turns;
    if (runs_in_sections(kernel, a)) a.ahead = a.heads_per_section.divisor;

    const auto heads = static_cast<unsigned>(p.hq);
    TESSERA_RETURN_IF_ERROR(launch(kernel.rows, dim3(static_cast<unsigned>(a.slots), heads),
                                   kRowThreads, kernel.rows_shared_bytes, a, stream));
    TESSERA_RETURN_IF_ERROR(launch(kernel.gradients,
                                   dim3(static_cast<unsigned>(a.tiles * a.sequences * tile.ctas())),
                                   BackwardTile::kThreads, kernel.shared_bytes, a, stream));
    if (a.dq_sums) {
      const bool by_tiles = a.ahead > 0 && tiles_convert(tile);  // all but the last section
      const int slots = num_tile_slots(p.thd_q, p.sq, by_tiles ? 1 : p.batch, tile.tile_m);
      const auto converted = by_tiles ? static_cast<unsigned>(a.ahead * p.group) : heads;
      TESSERA_RETURN_IF_ERROR(launch(kernel.convert, dim3(static_cast<unsigned>(slots), converted),
                                     kRowThreads, 0, a, stream));
    }
    if (!sums_bias) {
      TESSERA_RETURN_IF_ERROR(
          launch_dbias(problem, buffers, device, a, tile.tile_m, base + workspace.dbias));
    }
    return launch_dsink(a, tile.tile_m, stream);
  }

 private:
  static constexpr int kRowThreads = 128;
  static constexpr int64_t kBytesOfSum = 4;

  static const BackwardKernel& kernel_of(const Problem& problem) {
    const Sizes s = sizes_of(problem);
    const auto find = [&](int features) {
      return find_backward_kernel(problem.tensor[TESSERA_Q].dtype, s.dqk, s.dv, features);
    };
    const int features = features_of(problem);
    const BackwardKernel* special = sums_bias(problem) ? find(features | kGradientOfBias)
                                    : has_segments_alone(problem)
                                        ? find((features & kDeterministic) | kSegments)
                                        : nullptr;
    return special ? *special : *find(features);
  }

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

  void order_tiles(const BackwardKernel& kernel, BackwardParams& a) const {
    const Params& p = a.problem;
    const int tile_n = kernel.tile.tile_n();
    const bool in_turn = kernel.features & kDeterministic;
    const int tiles_n = (p.sk + tile_n - 1) / tile_n;
    const int batch = p.batch / a.sequences, heads = batch * p.hk;
    a.tiles = num_tile_slots(p.thd_k, p.sk, batch, tile_n) * p.hk;
    a.longest_first = p.right >= 0 || in_turn;
    const int64_t bytes_of_head = int64_t{p.group} * p.sq * (2 * (p.dqk + p.dv) + 4 * p.dqk);
    const int64_t bytes_in_flight = !in_turn       ? kL2Bytes
                                    : p.right >= 0 ? kL2BytesInTurn
                                                   : 2 * kL2Bytes;
    int per_section = static_cast<int>(
        std::clamp<int64_t>(bytes_in_flight / std::max<int64_t>(bytes_of_head, 1), 1, heads));
    if (in_turn) {
      per_section = std::min({p.group > 1 ? kMostInTurn : per_section, kMostInTurn,
                              p.right >= 0 && p.group == 1 ? std::max(heads / 2, 1) : heads});
    }
    if (!in_turn && p.right >= 0 && p.group > 1) {
      // Groups are large: their tiles stay in step. Those of a first section start together and
      // walk downwards; those of a second one start as the shortest of the first end, and walk
      // upwards: each begins at its diagonal when the one before comes by there.
      per_section = std::clamp((multiprocessors_ + tiles_n / 2) / tiles_n, 1, heads);
      a.alternates = !p.thd_k;
    }
    // Tiles of documents read little: of more heads side by side the last ones are shorter.
    if (!in_turn && kernel.features & kSegments) per_section = std::min(4 * per_section, heads);
    while (heads % per_section != 0) --per_section;
    if (in_turn && p.right >= 0) {
      // The last section begins with its longest tiles, so that all CTAs end together. Tiles of
      // groups are long and few: all of them do. Where masks leave blocks out, none can.
      a.upward_sections = p.thd_k || kernel.features & (kMasks | kSegments) ? heads / per_section
                          : p.group == 1 ? heads / per_section - 1
                                         : 0;
    }
    a.tiles_n = Divisor::of(tiles_n);
    a.heads = Divisor::of(p.hk);
    a.heads_per_section = Divisor::of(per_section);
    a.per_section = Divisor::of(per_section * tiles_n);
  }

  // Sums are cleared and converted by tiles of other sections (backward_sections.cuh).
  static bool runs_in_sections(const BackwardKernel& kernel, const BackwardParams& a) {
    const Params& p = a.problem;
    return is_plain(kernel.tile, kernel.features) && a.dq_sums && p.tensor[TESSERA_DK].data &&
           p.tensor[TESSERA_DV].data && !p.thd_q && !p.thd_k && a.slots > 0 && a.tiles > 0 &&
           p.batch * p.hk >= 2 * a.heads_per_section.divisor;
  }

  static Status launch(const void* function, dim3 grid, int threads, int shared_bytes,
                       const BackwardParams& a, cudaStream_t stream) {
    return launch_overlapping("backward", function, grid, threads, shared_bytes, &a, stream);
  }

  int multiprocessors_;
  std::unique_ptr<Plan> fallback_;
};

}  // namespace

void require_backward(Support& support, const Problem& p) {
  const Sizes s = sizes_of(p);
  const int dtype = p.tensor[TESSERA_Q].dtype;
  const BackwardKernel* kernel = find_backward_kernel(dtype, s.dqk, s.dv, features_of(p));
  support.require(kernel || !is_16bit(dtype), ReasonId::kHeadDim, Remedy::kNone, [&] {
    return "head_dim_qk=" + std::to_string(s.dqk) +
           ": and head_dim_v must be at most 256 in the backward pass";
  });
  // A box wholly outside a ragged map faults, so that all chunks of 64 columns must begin inside.
  const bool ragged =
      is_thd_q(p) || is_thd_k(p) || given(p, TESSERA_SEQLENS_Q) || given(p, TESSERA_SEQLENS_K);
  const auto in_last_chunk = [](int64_t dim, int tile) { return dim > (tile - 1) / 64 * 64; };
  support.require(
      !ragged || !kernel ||
          (in_last_chunk(s.dqk, kernel->tile.dqk) && in_last_chunk(s.dv, kernel->tile.dv)),
      ReasonId::kHeadDim, Remedy::kNone, [&] {
        return "head_dim_qk=" + std::to_string(s.dqk) + ", head_dim_v=" + std::to_string(s.dv) +
               ": with lengths, must end in the last 64 columns of the backward tile (" +
               std::to_string(kernel->tile.dqk) + ", " + std::to_string(kernel->tile.dv) + ")";
      });
}

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
                                          {kernel->gradients, kernel->shared_bytes}}) {
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
