// SPDX-License-Identifier: Apache-2.0
// Tensor maps: how the TMA unit sees q, k, v, o, their gradients and a bias. Made on the host for
// each call, in well under a microsecond each; nothing is allocated.
//
// A map has the axes [head_dim, head, row, row', batch], and a row of the tensor is the sum of the
// two row coordinates: both have the row stride. That makes reads "ragged". The extent of `row` is
// the map's reach and the base address is moved back by as many rows; the rows i = 0, 1, ... of a
// sequence that has `length` <= reach rows and is stored from row `first` on are then at
//
//   row = reach - length + i,   row' = first + length
//
// and rows i >= length are outside the map: they arrive as zeros, whatever is stored there. The
// reach is the extent of the side, which is the least that suits every length. The base then lies
// below the tensor by no more than the tensor's own size; where memory lies lower than that, calls
// are left to the fallback (machine/readable.h). A plain map has reach 0 and ends at the tensor's
// extent instead; its rows are at (i, 0).
#pragma once

#include <cuda.h>

#include <cstdint>

#include "core/problem/problem.h"
#include "cuda/sm90/machine/ragged.h"
#include "cuda/sm90/machine/readable.h"

namespace tessera::cuda::sm90 {

struct MapShape {
  CUtensorMapDataType type;  // of 2 bytes an element
  int64_t head_dim, heads, rows, batch;
  int64_t stride_head, stride_row, stride_batch;  // in elements; multiples of 8
  int box_rows;
  int reach;
  int box_heads = 1;
  bool brings_boxes_alone = false;  // into L2, where memory is what bounds the kernel
};

CUtensorMapDataType type_of_map(int dtype);  // of a 16-bit type

// base must be aligned to 16 bytes and in_address_space(), and no extent may be 0.
Status make_tensor_map(const MapShape& shape, const void* base, CUtensorMap* map);

// A tensor of bytes as one of pairs of bytes.
MapShape in_pairs(MapShape bytes);

// The shape of q, k, v, o or a gradient [batch, rows, heads, head_dim]; of fp8 in pairs.
MapShape shape_of(const Tensor& tensor, int box_rows, int reach);

// The same for a tensor of a problem.
Status map_of(const Problem& problem, const Buffers& buffers, int index, int box_rows, int reach,
              CUtensorMap* map);

// A bias or its gradient as a tensor of rows of keys, in boxes of `box_rows` rows and 64 keys; an
// axis of sequences or heads that is broadcast or expanded has one element.
Status map_of_bias(const Problem& problem, const Buffers& buffers, int index, int box_rows,
                   CUtensorMap* map);

}  // namespace tessera::cuda::sm90
