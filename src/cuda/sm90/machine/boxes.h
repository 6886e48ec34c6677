// SPDX-License-Identifier: Apache-2.0
// The boxes of TMA that blocks of keys are brought in where keys may lie in pages. No CUDA header.
#pragma once

#include <algorithm>

#include "cuda/common/rules/arguments.h"

namespace tessera::cuda::sm90 {

// True if pages are made of blocks of so many keys, or blocks of pages; or if there are no pages. No
// box is brought from an empty pool.
inline bool has_whole_boxes(const Problem& problem, int block_keys) {
  constexpr int kRowsOfSwizzle = 8;  // a box begins at a multiple of so many rows
  if (!is_paged(problem)) return true;
  const Tensor &k = problem.tensor[TESSERA_K], &v = problem.tensor[TESSERA_V];
  if (k.extent[0] == 0 || v.extent[0] == 0) return false;
  const int64_t page = k.extent[1];
  return page % block_keys == 0 || (block_keys % page == 0 && page % kRowsOfSwizzle == 0);
}

// Keys that one box brings: of a page, or of a block.
inline int keys_of_box(const Problem& problem, int block_keys) {
  const int64_t page = is_paged(problem) ? problem.tensor[TESSERA_K].extent[1] : block_keys;
  return static_cast<int>(std::min<int64_t>(page, block_keys));
}

}  // namespace tessera::cuda::sm90
