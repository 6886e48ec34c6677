// SPDX-License-Identifier: Apache-2.0
// Kernel arguments of the sm90 room: plain data, passed by value as __grid_constant__.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace tessera::cuda::sm90 {

struct ForwardParams {
  // [head_dim, head, row, row', batch]: boxes of 64 x 1 x tile rows x 1 x 1. A row of the tensor is
  // the sum of both row coordinates (tensormap.h says why there are two).
  CUtensorMap q, k, v;
  void* o;     // [batch, sq, hq, dv], strides below
  float* lse;  // [batch, hq, sq] or [hq, t]
  int64_t o_stride_batch, o_stride_row, o_stride_head;
  int64_t lse_stride_batch, lse_stride_head;
  int batch, heads_q, group;  // group = hq / hk
  int sq, sk, dv;             // extents
  int left, right;            // of the band, -1 = unbounded
  int bottom_right;           // the diagonal stands at len_k - len_q instead of 0
  float scale_log2;           // softmax_scale * log2(e), > 0
  // The schedule: tiles_m row tiles a head; heads in sections whose keys and values fit in L2.
  int tiles_m, tiles, heads_per_section;
  int longest_first;
};

}  // namespace tessera::cuda::sm90
