// SPDX-License-Identifier: Apache-2.0
// The one kernel of tessera_rotate and tessera_append, as data: which rows of which tensors move
// where, turned by which angles. No CUDA header.
#pragma once

#include "core/cache/append.h"
#include "core/cache/rotate.h"
#include "cuda/common/params.h"

namespace tessera::cuda {

// One tensor on its way; views are [batch, row, head].
struct Moved {
  View from;
  View to;     // a cache, or rows that stand as those of `from`
  View scale;  // [b|1, h] fp32, of an fp8 cache; null: 1
  int32_t heads, d;
  bool to_cache, turns;
};

struct MoveLaunch {
  Moved moved[3];    // k, v, q as far as they are given; x
  int32_t heads;     // of all of them
  int32_t width;     // pairs that a thread turns at a time: 8, with vectors of 16 bytes, or 1
  int32_t pieces;    // that a row of a head is cut into
  int32_t batch;     // sequences
  int64_t tokens;    // batch x sequence, or the rows of a packed buffer
  int64_t sequence;  // tokens of a padded sequence

  View cu_seqlens;  // [b+1] of packed tokens; null: padded
  View seqlens_q;   // [b] new tokens of a padded sequence; null: all
  View positions;   // [b] of first tokens or, with position_each, [b, s] of all; null: 0, 1, ...
  bool position_each;

  View page_table;  // [b, max_pages]; null: caches are [b, sk]
  int64_t page_size, pages;
  int64_t capacity;  // positions that a sequence has room for in its cache

  const float *cos, *sin;  // [max_position, half]
  int64_t cos_stride, sin_stride, max_position;
  int32_t half;
  bool interleaved, inverse;
};
static_assert(sizeof(MoveLaunch) <= 4096, "kernel arguments are 4 KB");

// The launches of validated arguments.
MoveLaunch launch_of(const RotateArgs& args);
MoveLaunch launch_of(const AppendArgs& args);

}  // namespace tessera::cuda
