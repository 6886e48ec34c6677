// SPDX-License-Identifier: Apache-2.0
// Where the parts of a block map lie in its workspace, by shapes alone: host code, apart from the
// kernels, so that a build without CUDA can test it.
#pragma once

#include "cuda/common/score/blocks.h"

namespace tessera::cuda {

// The parts of a map; null where the problem has nothing of the kind.
struct BlockLayout {
  int slots = 0, ranges_heads = 0;
  int tile_q = 0, tile_k = 0;
  int64_t tiles_q = 0, tiles_k = 0;
  int words = 0;  // of a row of the mask's bits; 0: none
  Hull* segments = nullptr;
  RangeHulls* ranges = nullptr;
  uint8_t* mask = nullptr;
  uint32_t* bits = nullptr;
  int64_t bytes = 0;
};

// Without a base, pointers are null and only sizes count.
BlockLayout layout_of(const Problem& problem, Walked walked, int tile, int step, bool with_bits,
                      void* base = nullptr);

// Keys that a mask speaks of: its own extent, or all where that axis is broadcast.
int64_t mask_keys(const Problem& problem);

}  // namespace tessera::cuda
