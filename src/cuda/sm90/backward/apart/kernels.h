// SPDX-License-Identifier: Apache-2.0
// The backward pass of short sequences, in two kernels that each own what they add up: dq by tiles
// of queries, dk and dv by tiles of keys. Seven products instead of five, but no sums in memory:
// nothing is cleared, added to or converted, and the result is the same bit for bit.
#pragma once

#include "cuda/common/rules/kernel.h"

namespace tessera::cuda::sm90 {

constexpr int kRowsOfBox = 64;  // of every tensor map, and what a consumer keeps
// Queries of a block that streams past in the second kernel. The first one leaves lse2 and delta in
// such blocks, each in a slot of its own (backward/params.h).
constexpr int rows_of_block(int dim) { return dim == 64 ? 128 : 64; }

// The column of backward/apart/table.def.
struct TwoTile {
  int dim;  // head dims up to this one, and more than dim - 64
};

struct TwoCode {
  int dq_shared_bytes, dkdv_shared_bytes;
  const void *dq, *dkdv;  // kTwoThreads, one CTA a multiprocessor; DqParams and DkdvParams
};
constexpr int kTwoThreads = 384;
constexpr int kTwoRows = 128;  // of a tile of either kernel

using TwoKernels = KernelRow<TwoTile, TwoCode>;

std::span<const TwoKernels> two_kernels();

// Null: none is built for these head dims.
const TwoKernels* find_two_kernels(int dtype, int64_t dqk, int64_t dv);

}  // namespace tessera::cuda::sm90
