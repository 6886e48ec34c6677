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
struct ApartTile {
  int dim;  // head dims up to this one, and more than dim - 64
};

struct ApartCode {
  int dq_shared_bytes, dkdv_shared_bytes;
  const void *dq, *dkdv;  // kApartThreads, one CTA a multiprocessor; DqParams and DkdvParams
};
constexpr int kApartThreads = 384;
constexpr int kApartRows = 128;  // of a tile of either kernel

using ApartKernels = KernelRow<ApartTile, ApartCode>;

std::span<const ApartKernels> apart_kernels();

// Null: none is built for these head dims.
const ApartKernels* find_apart_kernels(int dtype, int64_t dqk, int64_t dv);

}  // namespace tessera::cuda::sm90
