// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm90/decode/choice.h"

#include <algorithm>

#include "core/count.h"
#include "core/problem/dtype.h"
#include "cuda/common/features.h"
#include "cuda/common/rules/arguments.h"
#include "cuda/sm90/machine/boxes.h"

namespace tessera::cuda::sm90 {
namespace {

int64_t rows_of(const Problem& problem) {
  const Count queries = std::max<int64_t>(most_queries(problem), 1);
  return (queries * sizes_of(problem).group()).value();
}

// Whether kernels of forward/ have tiles for four heads and more of so many queries, which read keys once.
bool shares_a_tile(const Problem& problem) {
  constexpr int64_t kHeads = 4, kRowsOfTile = 128, kMostDim = 128;
  const Sizes s = sizes_of(problem);
  return s.group() % kHeads == 0 && kHeads * most_queries(problem) <= kRowsOfTile &&
         std::max(s.dqk, s.dv) <= kMostDim;
}

// Key heads whose rows of one key are read at about the same time by a CTA each: rows of heads that
// lie beside each other have pages of DRAM in common.
int kv_heads_beside(const Problem& problem) {
  constexpr int kMost = 8;
  int heads = 1;
  while (heads < kMost && sizes_of(problem).hk % (2 * heads) == 0) heads *= 2;
  return heads;
}

}  // namespace

const DecodeKernel* find_decode_kernel(const Problem& problem, int64_t rows) {
  const int dtype = problem.tensor[TESSERA_Q].dtype, cache = problem.tensor[TESSERA_K].dtype;
  if (!is_16bit(dtype) || (cache != dtype && !is_fp8(cache))) return nullptr;
  const DecodeCache stored = cache == dtype          ? DecodeCache::same
                             : cache == TESSERA_E4M3 ? DecodeCache::e4m3
                                                     : DecodeCache::e5m2;
  const Sizes s = sizes_of(problem);
  for (const DecodeKernel& kernel : decode_kernels()) {
    const DecodeTile& tile = kernel.tile;
    if (kernel.dtype == dtype && tile.cache == stored && tile.bucket >= std::max(s.dqk, s.dv) &&
        tile.rows >= rows) {
      return &kernel;
    }
  }
  return nullptr;
}

bool runs_in_decode(const Problem& problem) {
  // Beyond so many queries of whole keys in the type of q the kernels of forward/ are faster.
  constexpr int64_t kFewQueries = 16;
  if (is_backward(problem) || is_rounded(problem)) return false;
  const int cache = problem.tensor[TESSERA_K].dtype;
  const bool plain_keys = !is_paged(problem) && cache == problem.tensor[TESSERA_Q].dtype;
  if (plain_keys && most_queries(problem) > kFewQueries) return false;
  // 32 rows take as long again as 16, and tiles of more heads no longer (8 x 4 queries of 64 heads on 8,
  // 8k keys, on an H200: 117 us here, 75 there).
  constexpr int64_t kFewRows = 16;
  if (cache == problem.tensor[TESSERA_Q].dtype && rows_of(problem) > kFewRows &&
      !has(problem, TESSERA_BATCH_INVARIANT) && shares_a_tile(problem)) {
    return false;
  }
  if (problem.tensor[TESSERA_V].dtype != cache ||
      problem.tensor[TESSERA_O].dtype != problem.tensor[TESSERA_Q].dtype ||
      !find_decode_kernel(problem, rows_of(problem))) {
    return false;
  }
  const bool plain = (features_of(problem) & kEverything) == kLean && !has_positions(problem) &&
                     !given(problem, TESSERA_MAX_LOGIT) && !has(problem, TESSERA_ACCUMULATE);
  if (!plain || !has_whole_boxes(problem, DecodeTile::kKeys)) return false;
  const CutTile tile = decode_tile_of(problem, decode_kernel_of(problem));
  const int64_t steps = sizes_of(problem).sk / tile.step_keys + 1;
  const int64_t units = units_of(problem, tile.rows, tile.pack);
  const bool may_depend_on_batch = !has(problem, TESSERA_BATCH_INVARIANT);
  // Boxes of eight keys take as long as higher ones: cuda_sm80 is as fast in short work and faster in
  // long (64 x 8k, 32 heads on 8, on an H200: 770 us here, 537 there).
  constexpr int kLeastBoxKeys = 16;
  const int box_keys = keys_of_box(problem, DecodeTile::kKeys);
  if (may_depend_on_batch && box_keys < kLeastBoxKeys) return false;
  // Low boxes of short rows bring bytes at 0.85 of the speed of others: long work of pages of 16 keys
  // in E4M3 is faster in cuda_sm80 (64 x 8k, 32 heads on 8, on an H200: 351 us here, 300 there).
  constexpr int64_t kManySteps = 4096;
  const bool has_low_boxes = is_fp8(cache) && box_keys < DecodeTile::kKeys;
  if (has_low_boxes && may_depend_on_batch && units > kManySteps / steps) return false;
  return units < kMostCells / steps;
}

const DecodeKernel& decode_kernel_of(const Problem& problem) {
  return *find_decode_kernel(problem, rows_of(problem));
}

int decode_cluster_of(const Problem& problem, int multiprocessors) {
  constexpr int64_t kMost = 8, kFewBytes = 8 << 20;
  const Sizes s = sizes_of(problem);
  const CutTile tile = decode_tile_of(problem, decode_kernel_of(problem));
  const bool has_lengths = given(problem, TESSERA_SEQLENS_Q) || given(problem, TESSERA_SEQLENS_K);
  const bool are_alike = !is_thd_q(problem) && (s.batch == 1 || !has_lengths) &&
                         s.sq <= tile.rows / tile.pack && !has(problem, TESSERA_BATCH_INVARIANT);
  if (!are_alike) return 1;
  const int64_t units = units_of(problem, tile.rows, tile.pack);
  const Count bytes =
      Count{s.batch} * s.hk * s.sk * (s.dqk + s.dv) * size_of(problem.tensor[TESSERA_K].dtype);
  if (Count{kFewBytes} < bytes) {
    // Pairs that fill the GPU.
    return 2 * units <= multiprocessors && 20 * units >= 9 * multiprocessors ? 2 : 1;
  }
  // A block for each team of a CTA, on half of the GPU: more CTAs in clusters of four and eight may
  // not run at a time.
  int64_t ctas = 1;
  while (2 * ctas <= kMost && 4 * ctas * units <= multiprocessors &&
         2 * ctas * DecodeTile::kTeams * tile.step_keys <= s.sk) {
    ctas *= 2;
  }
  return static_cast<int>(ctas);
}

int64_t queries_of_step(const Problem& problem, const DecodeKernel& kernel) {
  return kernel.tile.rows / sizes_of(problem).group();
}

const DecodeKernel* kernel_of_steps(const Problem& problem) {
  // One query of each of a group's heads, or as many as fill eight rows: 16 rows took half as long again
  // (56 steps of groups of 8 on 2k keys, H200).
  constexpr int64_t kRows = 8;
  const Sizes s = sizes_of(problem);
  if (!is_thd_q(problem) || has_positions(problem) || given(problem, TESSERA_MAX_LOGIT)) {
    return nullptr;
  }
  // Sequences that are all of the longest one's length have no steps among them.
  if (s.sq >= (Count{s.batch} * most_queries(problem)).value()) return nullptr;
  if (!has_whole_boxes(problem, DecodeTile::kKeys)) return nullptr;
  const DecodeKernel* kernel = find_decode_kernel(problem, std::max(kRows, s.group()));
  if (!kernel || queries_of_step(problem, *kernel) >= most_queries(problem)) return nullptr;
  const CutTile tile = decode_tile_of(problem, *kernel);
  const int64_t steps = s.sk / tile.step_keys + 1;
  return units_of(problem, tile.rows, tile.pack) < kMostCells / steps ? kernel : nullptr;
}

CutTile decode_tile_of(const Problem& problem, const DecodeKernel& kernel) {
  // A part that does not depend on the batch has so many keys that bringing it costs little beside
  // reading them.
  constexpr int kLeastKeys = 256, kLeastKeysOfRow = 16, kMostChunks = 256;
  const int rows = kernel.tile.rows;
  return {.rows = rows,
          .pack = static_cast<int>(sizes_of(problem).group()),
          .step_keys = DecodeTile::kKeys,
          .beside = kv_heads_beside(problem),
          .least_keys = std::max(kLeastKeys, kLeastKeysOfRow * rows),
          .most_parts = kMostChunks};
}

}  // namespace tessera::cuda::sm90
