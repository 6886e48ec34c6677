// SPDX-License-Identifier: Apache-2.0
// Kernel arguments of sm90: plain data, passed by value as a __grid_constant__.
#pragma once

#include <cuda.h>
#include <vector_types.h>

#include "cuda/common/divisor.h"
#include "cuda/common/params.h"

namespace tessera::cuda::sm90 {

constexpr int kNoSpan = -1;  // as both ends

struct alignas(64) TileCounter {
  uint64_t mark;
  uint32_t next, finished;
};

struct ForwardParams {
  // How TMA sees the inputs (machine/tensormap.h). q and k end at their tensors' extents: rows
  // beyond a sequence give scores that are masked, or rows that are not stored. v is ragged where
  // lengths are given, because a weight of 0 does not protect from a NaN, and o where it is packed,
  // because the rows below a sequence are another's.
  CUtensorMap q, k, v, o;
  Params problem;

  // The order of `tiles` row tiles (forward/schedule.cuh). Dense problems have tiles_m a head, and
  // sections of heads (forward/host.cc says how many); sections divide the heads evenly.
  int tiles;
  Divisor tiles_m, heads, heads_per_section, per_section;
  int longest_first;
  int keys_per_section;  // of packed problems: heads x keys that fit in L2 together
  int reach_v;           // of its map (machine/ragged.h)
  TileCounter* counter;  // in the workspace; null: every CTA has one tile
  uint64_t mark;         // of this launch, not 0

  // The dense mask, packed (forward/score/pack_mask.h); null without one. A batch or head axis that
  // is broadcast has stride 0; strides count heads.
  const void* mask_bits;       // [heads, mask_rows, mask_blocks, 4] of tile_n / 4 bits
  const uint8_t* mask_states;  // [heads, mask_tiles, mask_blocks]
  int mask_rows, mask_tiles, mask_blocks;
  int mask_stride_batch, mask_stride_head;

  // Lowest and highest id of each block of keys (forward/score/segments.h); null without segments.
  const int2* segments;
  // The keys of the segment of each row of q as stored, or kNoSpan (forward/score/segments.h); null
  // where not looked for.
  const int2* spans;

  // A bias that TMA reads; an axis that is broadcast has factor 0.
  CUtensorMap bias;
  int bias_in_tiles, bias_columns, bias_factor_batch, bias_factor_head;
};

static_assert(sizeof(ForwardParams) <= 4096, "kernel arguments are 4 KB");

}  // namespace tessera::cuda::sm90
