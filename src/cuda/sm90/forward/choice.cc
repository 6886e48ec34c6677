// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm90/forward/choice.h"

#include <algorithm>

#include "core/count.h"
#include "core/problem/dtype.h"
#include "cuda/sm90/machine/boxes.h"
#include "cuda/sm90/machine/readable.h"

namespace tessera::cuda::sm90 {
namespace {

// The kernel of ALiBi alone divides slopes by the scale.
ForwardNeeds needs_of(const Problem& p, const void* bias, float scale) {
  constexpr float kLeastScale = 0x1p-60f;
  const uint32_t features = features_of(p) & kEverything;
  if (features == kAlibi && !(scale >= kLeastScale)) return {kEverything, true};
  return {.features = features,
          .loads_bias = (features & kBias) && !maps_bias(p, bias),
          .pages = is_paged(p),
          .e4m3 = is_paged(p) && p.tensor[TESSERA_K].dtype == TESSERA_E4M3};
}

// Up to how many keys a sequence under a diagonal counts as short. Measured at d64: lean kernels
// in docs/lab/2026-11-22-sm90-forward.md, those of a feature in 2026-11-22-sm90-features.md there.
int most_keys_of_short(uint32_t features) {
  if (features == kAlibi) return 1024;
  if (features == kSoftcap) return 4096;
  return 2048;
}

// Whether 32 bits count the units of 16 bytes from a pool's begin.
bool has_rows(const Problem& problem) {
  constexpr int64_t kMost = int64_t{1} << 32, kBytes = 16;
  for (const int index : {TESSERA_K, TESSERA_V}) {
    const Tensor& pool = problem.tensor[index];
    const int64_t elements = kBytes / size_of(pool.dtype);
    const Count units = Count{pool.extent[0]} * (pool.stride[0] / elements) +
                        Count{pool.extent[1]} * (pool.stride[1] / elements);
    if (pool.extent[0] == 0 || !(units < Count{kMost})) return false;
  }
  return true;
}

// Rows of the tiles that may have more than one head.
constexpr int kRowsOfTile = 128;

// The queries of the longest sequence.
int queries_of(const Params& p) { return p.thd_q ? p.longest_q : p.sq; }

}  // namespace

const ForwardKernel* find_forward_kernel(const ForwardNeeds& needs, int dtype, int64_t dqk,
                                         int64_t dv, int most_consumers) {
  const ForwardKernel* best = nullptr;
  for (const ForwardKernel& kernel : forward_kernels()) {
    const ForwardTile& tile = kernel.tile;
    const bool knows = (needs.features & ~kernel.features) == 0 &&
                       (tile.loads_bias || !needs.loads_bias) && tile.pages == needs.pages &&
                       tile.heads == needs.heads && tile.parts == needs.parts &&
                       tile.e4m3 == needs.e4m3;
    if (!knows || kernel.dtype != dtype || tile.dqk < dqk || tile.dv < dv) continue;
    if (tile.consumers > most_consumers) continue;
    if (!best || tile.dqk + tile.dv < best->tile.dqk + best->tile.dv) best = &kernel;
  }
  return best;
}

const ForwardKernel* kernel_of_more_columns(int dtype, int64_t dqk, int64_t dv) {
  constexpr int kFrom = 64, kTo = 96, kMore = 128;
  if (std::min(dqk, dv) <= kFrom || std::max(dqk, dv) > kTo) return nullptr;
  return find_forward_kernel({kLean}, dtype, kMore, kMore);
}

bool reads_pages(const Problem& problem) {
  if (!is_paged(problem) || is_backward(problem) || is_rounded(problem)) return false;
  const int dtype = problem.tensor[TESSERA_Q].dtype, cache = problem.tensor[TESSERA_K].dtype;
  const bool is_e4m3 = cache == TESSERA_E4M3 && is_16bit(dtype);
  if ((cache != dtype && !is_e4m3) || problem.tensor[TESSERA_V].dtype != cache ||
      problem.tensor[TESSERA_O].dtype != dtype) {
    return false;
  }
  const bool plain = (features_of(problem) & kEverything) == kLean &&
                     !has(problem, TESSERA_ACCUMULATE) && !has(problem, TESSERA_BATCH_INVARIANT);
  const Sizes s = sizes_of(problem);
  constexpr int64_t kUnitOfE4m3 = 16;  // copies are of whole ones
  if (is_e4m3 && (s.dqk % kUnitOfE4m3 != 0 || s.dv % kUnitOfE4m3 != 0)) return false;
  const ForwardKernel* kernel =
      find_forward_kernel({.features = kLean, .pages = true, .e4m3 = is_e4m3}, dtype, s.dqk, s.dv);
  return plain && kernel && (keys_of_boxes(problem, kernel->tile) > 0 || has_rows(problem));
}

int keys_of_boxes(const Problem& problem, const ForwardTile& tile) {
  return !tile.e4m3 && has_whole_boxes(problem, tile.tile_n) ? keys_of_box(problem, tile.tile_n)
                                                             : 0;
}

const ForwardKernel& tall_kernel_of(const Problem& problem, const void* bias, float scale) {
  const Sizes s = sizes_of(problem);
  return *find_forward_kernel(needs_of(problem, bias, scale), problem.tensor[TESSERA_Q].dtype,
                              s.dqk, s.dv);
}

int heads_that_share_keys(const Problem& problem) {
  const Sizes s = sizes_of(problem);
  const int dtype = problem.tensor[TESSERA_Q].dtype;
  for (int heads = kMostHeadsOfTile; heads > 0; heads /= 2) {
    if (most_queries(problem) * heads > kRowsOfTile || s.group() % heads != 0) continue;
    const ForwardNeeds needs{.features = kLean,
                             .pages = is_paged(problem),
                             .heads = heads,
                             .e4m3 = problem.tensor[TESSERA_K].dtype == TESSERA_E4M3};
    const ForwardKernel* const kernel = find_forward_kernel(needs, dtype, s.dqk, s.dv);
    if (!kernel || (is_paged(problem) && keys_of_boxes(problem, kernel->tile) == 0)) continue;
    return heads;
  }
  return 1;
}

// What takes the least time on an H200: 12 ns a key and tile of 128 rows and columns, 15 of pages, all
// multiprocessors at a time, 3 us for what a tile has beside its keys, and 9 us to merge, a launch among
// them. A gain that is small is none: lengths may be shorter.
int parts_of_tile(const Params& p, const ForwardTile& tile, int multiprocessors) {
  constexpr double kKey = 12e-3, kKeyOfPages = 15e-3, kTile = 3, kMerge = 9;  // us
  constexpr double kGain = 1.1;
  constexpr int kMost = 32, kLeastKeys = 256, kManyKeys = 2;
  if (!tile.parts || p.thd_k || p.flags & TESSERA_BATCH_INVARIANT) return 1;
  // Elsewhere a band leaves few keys to many tiles.
  const bool has_diagonal = p.window.right >= 0;
  if (p.window.left >= 0 || (has_diagonal && int64_t{queries_of(p)} * kManyKeys > p.sk)) return 1;
  const int64_t tiles =
      num_tile_slots(p.thd_q, p.sq, p.batch, tile.tile_m()) * int64_t{p.hq / tile.heads};
  const int keys = has_diagonal && !p.bottom_right ? queries_of(p) : p.sk;
  // From five tiles a multiprocessor on a cut saves less than that: at most the last of six rounds.
  if (tiles >= int64_t{5} * multiprocessors) return 1;
  const double of_keys = (tile.pages ? kKeyOfPages : kKey) * keys * (tile.dqk + tile.dv) / 256;
  const auto time = [&](int parts) {
    const int64_t rounds = (tiles * parts + multiprocessors - 1) / multiprocessors;
    return rounds * (of_keys / parts + kTile) + (parts > 1 ? kMerge : 0);
  };
  int best = 1;
  for (int parts = 2; parts <= kMost && int64_t{parts} * kLeastKeys <= keys; ++parts) {
    if (time(parts) < time(best) / (best == 1 ? kGain : 1)) best = parts;
  }
  return best;
}

// The row of the table with the same features and head dims and as many rows a tile as suit the
// problem (docs/lab/2026-11-22-sm90-forward.md, d64). Fewer waste less on the diagonal and at the
// end of a sequence, and there are more tiles: 128 instead of 192 where tall ones leave SMs idle,
// 64 for short sequences, if each of the three CTAs of an SM has a few.
const ForwardKernel& with_rows(const Params& p, const ForwardKernel& tall, int multiprocessors) {
  constexpr int kShortWithoutDiagonal = 512;  // keys of a sequence
  constexpr int kLoneTiles = 4;               // of a CTA
  // Blocks of 128 keys instead of 160, and two tiles' queries at a time: 1.11 to 1.23 times as fast
  // from 256 to 1024 keys.
  constexpr int kShortOfMoreColumns = 1024;
  const ForwardTile& tile = tall.tile;
  if (tall.features == kLean && !tile.pages && p.window.right >= 0 && p.sk <= kShortOfMoreColumns &&
      !p.thd_q && !p.thd_k) {
    if (const auto* more = kernel_of_more_columns(tall.dtype, p.dqk, p.dv)) return *more;
  }
  const auto row = [&](int consumers) {
    const ForwardKernel* kernel = find_forward_kernel({.features = tall.features,
                                                       .loads_bias = tile.loads_bias,
                                                       .pages = tile.pages,
                                                       .e4m3 = tile.e4m3},
                                                      tall.dtype, tile.dqk, tile.dv, consumers);
    return kernel && kernel->tile.dqk == tile.dqk && kernel->tile.dv == tile.dv ? kernel : nullptr;
  };
  const auto tiles = [&](const ForwardKernel& kernel) {
    return num_tile_slots(p.thd_q, p.sq, p.batch, kernel.tile.tile_m()) * p.hq;
  };
  const ForwardKernel* const low = row(kConsumersOfLowTile);
  const ForwardKernel* const lone = row(kConsumersOfLoneTile);
  const int keys = p.thd_k ? p.sk / p.batch : p.sk;
  const bool is_short = p.window.right >= 0 && keys <= most_keys_of_short(tall.features);
  if (lone && (is_short || keys <= kShortWithoutDiagonal) &&
      tiles(*lone) >= kLoneTiles * lone->tile.ctas * multiprocessors) {
    return *lone;
  }
  // A tile of one head would be half empty, or more.
  for (int heads = kMostHeadsOfTile; heads > 0; heads /= 2) {
    if (heads > 1 && (queries_of(p) * heads > kRowsOfTile || p.group % heads != 0)) continue;
    ForwardNeeds needs{.features = tall.features,
                       .loads_bias = tile.loads_bias,
                       .pages = tile.pages,
                       .heads = heads,
                       .parts = true,
                       .e4m3 = tile.e4m3};
    const ForwardKernel* const cut = find_forward_kernel(needs, tall.dtype, tile.dqk, tile.dv);
    if (cut && parts_of_tile(p, cut->tile, multiprocessors) > 1) return *cut;
    if (heads == 1) break;
    needs.parts = false;
    const ForwardKernel* const whole = find_forward_kernel(needs, tall.dtype, tile.dqk, tile.dv);
    if (whole) return *whole;
  }
  return low && (is_short || tiles(tall) < multiprocessors) ? *low : tall;
}

}  // namespace tessera::cuda::sm90
