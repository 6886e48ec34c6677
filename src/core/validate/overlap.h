// SPDX-License-Identifier: Apache-2.0
// Whether strided tensors share memory, decided exactly: disjoint views of one buffer may
// interleave (dq, dk, dv in one qkv buffer), so a comparison of address ranges is the quick answer
// only. Nothing here allocates.
#pragma once

#include "core/problem/problem.h"

namespace tessera {

// Two indices of the tensor name one element. Strides of axes with extent > 1 are > 0, the tensor
// is not empty and its reach fits in 63 bits.
bool overlaps_itself(const Tensor& tensor, int rank);

// Bytes from the first to past the last one; 0 for an empty tensor.
uint64_t reach_in_bytes(const Tensor& tensor, int rank);

// The bytes of a tensor in memory.
struct Footprint {
  uint64_t begin = 0, end = 0;  // end is past the last byte; empty tensors have begin == end
  int64_t element = 1;          // bytes of one
  int rank = 0;                 // axes of extent > 1 and stride > 0 only
  int64_t extent[4] = {};
  int64_t stride[4] = {};  // bytes
};
Footprint footprint_of(const Tensor& tensor, int rank, const void* data);

// Elements are aligned to their size, sizes are powers of two. Adversarial strides that would take
// more than a few milliseconds to tell apart count as shared.
bool share_memory(const Footprint& a, const Footprint& b);

}  // namespace tessera
