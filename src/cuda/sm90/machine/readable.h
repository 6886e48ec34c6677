// SPDX-License-Identifier: Apache-2.0
// What TMA can read, as far as shapes, strides and addresses tell. No CUDA header.
#pragma once

#include <cstdint>
#include <span>

#include "core/problem/problem.h"

namespace tessera::cuda::sm90 {

constexpr int64_t kMostStride = int64_t{1} << 39;  // elements; TMA strides are below 2^40 bytes

// True if TMA can read the bias at `base` as rows of keys in q's 16-bit type.
bool maps_bias(const Problem& problem, const void* base);

// The two axes of rows of a tensor map: the row at the coordinates (c2, c3) is c2 stride[0] +
// c3 stride[1] bytes from `base` on, and exists below both extents.
struct RowAxes {
  uint64_t base;
  uint64_t extent[2];
  uint64_t stride[2];  // bytes
};

// The axes of the map of a tensor of `rows` rows at `address`, as machine/tensormap.h describes.
// row_bytes: the stride of rows. A map of reach > 0 must be in_address_space().
RowAxes row_axes(uint64_t address, int64_t rows, int64_t row_bytes, int64_t reach);

// True if the base of a map of that reach is a positive address. The map's last row is the
// tensor's, so that nothing has to be asked of the other end.
bool in_address_space(uint64_t address, int64_t row_bytes, int64_t reach);

// The stride of an axis of a 16-bit tensor in bytes, as its map has it: that of an axis of extent 1
// is never used, but must be a legal one.
int64_t bytes_of_stride(int64_t stride, int64_t extent);

// True for a side of queries, or of keys, whose sequences end before its tensors do: its maps are
// ragged, but for those of rows that nobody uses.
bool is_ragged_q(const Problem& problem);
bool is_ragged_k(const Problem& problem);

// Why TMA cannot address a tensor of a call; rule is null where it can address all of them.
struct Unaddressable {
  const char* name;     // of the tensor
  const void* address;  // of its data
  const char* rule;
};

// The first of the tensors `indices` that the problem gives and that is not at a multiple of 16
// bytes, or whose ragged map would begin below the address space. Allocates nothing.
Unaddressable first_unaddressable(const Problem& problem, const Buffers& buffers,
                                  std::span<const int> indices);

}  // namespace tessera::cuda::sm90
