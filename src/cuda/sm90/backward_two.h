// SPDX-License-Identifier: Apache-2.0
// The backward pass of short sequences, in two kernels that each own what they add up: dq by tiles
// of queries, dk and dv by tiles of keys. Seven products instead of five, but no sums in memory:
// nothing is cleared, added to or converted, and the result is the same bit for bit.
#pragma once

#include <span>

#include "cuda/sm90/backward_params.h"
#include "cuda/sm90/params.h"

namespace tessera::cuda::sm90 {

constexpr int kRowsOfBox = 64;  // of every tensor map, and what a consumer keeps
// Queries of a block that streams past in the second kernel. The first one leaves lse2 and delta in
// such blocks, each in a slot of its own (backward_params.h).
constexpr int rows_of_block(int dim) { return dim == 64 ? 128 : 64; }

// Of dq's kernel. `problem` and o are those of a forward pass whose o is dq and which has neither
// lse nor sinks; k and v are ragged where lengths are given.
struct DqParams : ForwardParams {
  CUtensorMap grad_o, forward_o;
  View lse, grad_lse;
  int slots;            // of one head, of rows_of_block() each
  float *lse2, *delta;  // as in BackwardParams, for the second kernel
};
static_assert(sizeof(DqParams) <= 4096, "kernel arguments are 4 KB");

// Of the kernel of dk and dv. All maps have boxes of kRowsOfBox rows; grad_k and grad_v are ragged
// where keys are packed.
struct DkdvParams : BackwardParams {
  TileCounter* counter;
  uint64_t mark;
};
static_assert(sizeof(DkdvParams) <= 4096, "kernel arguments are 4 KB");

struct TwoKernels {
  int dtype, dim;  // head dims up to this one, and more than dim - 64
  int dq_shared_bytes, dkdv_shared_bytes;
  const void *dq, *dkdv;  // kTwoThreads, one CTA a multiprocessor
};
constexpr int kTwoThreads = 384;
constexpr int kTwoRows = 128;  // of a tile of either kernel

std::span<const TwoKernels> two_kernels();

}  // namespace tessera::cuda::sm90
