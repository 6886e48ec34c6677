// SPDX-License-Identifier: Apache-2.0
// What blocks.h leaves for kernels to read: which blocks of a walk anything shows.
#pragma once

#include <cstdint>

namespace tessera::cuda {

// [lo, hi) of keys, or lowest and highest segment id.
struct Hull {
  int lo, hi;
};

// Keys that some row of a block sees through range i, and that all its rows see.
struct RangeHulls {
  Hull any[2], all[2];
};

enum BlockState : uint8_t { kBlockHidden = 0, kBlockPartial = 1, kBlockFull = 2 };

// Null pointers: nothing of the kind, or not worth a look.
struct BlockMap {
  int step;                  // rows of a block
  int slots;                 // of blocks: see slot_of_block
  const Hull* segments;      // [slots], of the walked side; both ends inclusive
  const RangeHulls* ranges;  // [heads | 1, slots], walking queries
  int64_t ranges_head;       // slots, or 0
  const uint8_t* mask;       // [b | 1, heads | 1, tiles of queries, tiles of keys] BlockState
  int64_t mask_batch, mask_head, mask_row;  // strides; 0 where broadcast
  const uint32_t*
      bits;  // [b | 1, heads | 1, rows | 1, words of 128 keys] the mask, bit set = shown
  int64_t bits_batch, bits_head;  // strides in words; 0 where broadcast
  int bits_row;
};

}  // namespace tessera::cuda
