// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm90/mla/choice.h"

#include <algorithm>

#include "core/problem/dtype.h"
#include "cuda/common/features.h"
#include "cuda/common/rules/arguments.h"
#include "cuda/sm90/machine/boxes.h"

namespace tessera::cuda::sm90 {
namespace {

// Heads that share a unit's rows: a CTA has all of its heads of one query, or whole queries.
int pack_of_group(int64_t group) {
  constexpr int64_t kRows = MlaTile::kRows;
  if (group % kRows == 0) return static_cast<int>(group % (2 * kRows) == 0 ? 2 * kRows : kRows);
  return static_cast<int>(std::min(group & -group, kRows));  // the largest power of two in it
}

// True if TMA brings the keys of a 16-bit cache. A block of pages of 16 keys is 36 boxes, and rows one by
// one are faster: 64 x 8k of 128 heads on an H200 take 330 us in boxes of 16 keys, 291 row by row in
// pages of 1, 250 in boxes of 64.
bool comes_by_boxes(const Problem& problem) {
  constexpr int kLeastBoxKeys = 32;
  return has_whole_boxes(problem, MlaTile::kKeys) &&
         keys_of_box(problem, MlaTile::kKeys) >= kLeastBoxKeys;
}

}  // namespace

bool has_types_of(const MlaKernel& kernel, const Problem& problem) {
  const Sizes s = sizes_of(problem);
  const int dtype = problem.tensor[TESSERA_Q].dtype, stored = problem.tensor[TESSERA_K].dtype;
  return kernel.dtype == dtype && kernel.tile.dqk == s.dqk && kernel.tile.dv == s.dv &&
         stored == (kernel.tile.keys == MlaKeys::e4m3 ? TESSERA_E4M3 : dtype);
}

const MlaKernel* find_mla_kernel(const Problem& problem, int rows) {
  const MlaKeys keys = problem.tensor[TESSERA_K].dtype == TESSERA_E4M3 ? MlaKeys::e4m3
                       : comes_by_boxes(problem)                       ? MlaKeys::boxes
                                                                       : MlaKeys::rows;
  for (const MlaKernel& kernel : mla_kernels()) {
    if (has_types_of(kernel, problem) && kernel.tile.keys == keys && kernel.tile.rows() == rows) {
      return &kernel;
    }
  }
  return nullptr;
}

const MlaKernel& mla_kernel_of(const Problem& problem) {
  return *find_mla_kernel(problem, mla_tile_of(problem).rows);
}

bool runs_in_mla(const Problem& problem) {
  constexpr int64_t kFewQueries = 64;
  const Sizes s = sizes_of(problem);
  if (is_backward(problem) || !has(problem, TESSERA_V_IN_K) || is_rounded(problem) ||
      !find_mla_kernel(problem, MlaTile::kRows) ||
      problem.tensor[TESSERA_V].dtype != problem.tensor[TESSERA_K].dtype ||
      problem.tensor[TESSERA_O].dtype != problem.tensor[TESSERA_Q].dtype) {
    return false;
  }
  const bool converts = problem.tensor[TESSERA_K].dtype == TESSERA_E4M3;
  const bool plain = (features_of(problem) & kEverything) == kLean && !has_positions(problem) &&
                     !given(problem, TESSERA_MAX_LOGIT) && !has(problem, TESSERA_ACCUMULATE);
  if (!plain) return false;
  if (!is_paged(problem) && !converts && most_queries(problem) > kFewQueries) return false;
  const CutTile tile = mla_tile_of(problem);
  const int64_t steps = s.sk / tile.step_keys + 1;
  return units_of(problem, tile.rows, tile.pack) < kMostCells / steps;
}

CutTile mla_tile_of(const Problem& problem) {
  constexpr int kRows = MlaTile::kRows, kLeastKeys = 512;
  constexpr int kMostParts = 64;  // of 256 KB each
  const int pack = pack_of_group(sizes_of(problem).group());
  const bool one = std::max<int64_t>(most_queries(problem), 1) <= kRows / pack;
  return {.rows = one ? kRows : 2 * kRows,
          .pack = pack,
          .step_keys = MlaTile::kKeys,
          .least_keys = kLeastKeys,
          .most_parts = kMostParts};
}

}  // namespace tessera::cuda::sm90
