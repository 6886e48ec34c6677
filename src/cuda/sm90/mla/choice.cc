// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm90/mla/choice.h"

#include <algorithm>

#include "core/problem/dtype.h"
#include "cuda/common/features.h"
#include "cuda/common/rules/arguments.h"

namespace tessera::cuda::sm90 {
namespace {

constexpr int kRowsOfSwizzle = 8;  // a box of TMA begins at a multiple of so many rows

// Pages that blocks of keys are made of, or that are made of blocks.
bool has_whole_boxes(const Problem& problem) {
  if (!is_paged(problem)) return true;
  const int64_t page = problem.tensor[TESSERA_K].extent[1];
  return page % MlaTile::kKeys == 0 || (MlaTile::kKeys % page == 0 && page % kRowsOfSwizzle == 0);
}

// Heads that share a unit's rows: a CTA has all of its heads of one query, or whole queries.
int pack_of_group(int64_t group) {
  constexpr int64_t kRows = MlaTile::kRows;
  if (group % kRows == 0) return static_cast<int>(group % (2 * kRows) == 0 ? 2 * kRows : kRows);
  return static_cast<int>(std::min(group & -group, kRows));  // the largest power of two in it
}

}  // namespace

const MlaKernel* find_mla_kernel(int dtype, int64_t dqk, int64_t dv, int rows) {
  for (const MlaKernel& kernel : mla_kernels()) {
    const MlaTile& tile = kernel.tile;
    if (kernel.dtype == dtype && tile.dqk == dqk && tile.dv == dv && tile.rows() == rows) {
      return &kernel;
    }
  }
  return nullptr;
}

const MlaKernel& mla_kernel_of(const Problem& problem) {
  const Sizes s = sizes_of(problem);
  const int dtype = problem.tensor[TESSERA_Q].dtype;
  return *find_mla_kernel(dtype, s.dqk, s.dv, mla_tile_of(problem).rows);
}

bool runs_in_mla(const Problem& problem) {
  constexpr int64_t kFewQueries = 64;
  const Sizes s = sizes_of(problem);
  const int dtype = problem.tensor[TESSERA_Q].dtype;
  if (is_backward(problem) || !has(problem, TESSERA_V_IN_K) ||
      !find_mla_kernel(dtype, s.dqk, s.dv, MlaTile::kRows)) {
    return false;
  }
  for (const int index : {TESSERA_K, TESSERA_V, TESSERA_O}) {
    if (problem.tensor[index].dtype != dtype) return false;
  }
  const bool plain = (features_of(problem) & kEverything) == kLean && !has_positions(problem) &&
                     !given(problem, TESSERA_MAX_LOGIT) && !has(problem, TESSERA_ACCUMULATE);
  if (!plain || !has_whole_boxes(problem)) return false;
  if (!is_paged(problem) && most_queries(problem) > kFewQueries) return false;
  const CutTile tile = mla_tile_of(problem);
  const int64_t steps = s.sk / tile.step_keys + 1;
  return units_of(problem, tile.rows, tile.pack) < kMostCells / steps;
}

CutTile mla_tile_of(const Problem& problem) {
  constexpr int kRows = MlaTile::kRows, kLeastKeys = 512;
  constexpr int kMostParts = 64;  // of 256 KB each
  const int pack = pack_of_group(sizes_of(problem).group());
  const bool one = std::max<int64_t>(most_queries(problem), 1) * pack <= kRows;
  return {.rows = one ? kRows : 2 * kRows,
          .pack = pack,
          .step_keys = MlaTile::kKeys,
          .least_keys = kLeastKeys,
          .most_parts = kMostParts};
}

int keys_of_box(const Problem& problem) {
  const int64_t page = is_paged(problem) ? problem.tensor[TESSERA_K].extent[1] : MlaTile::kKeys;
  return static_cast<int>(std::min<int64_t>(page, MlaTile::kKeys));
}

}  // namespace tessera::cuda::sm90
