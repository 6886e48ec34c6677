// SPDX-License-Identifier: Apache-2.0
// The table of backward kernels: a row for each ROW of backward/table.def and each 16-bit type.
#pragma once

#include "cuda/common/rules/kernel.h"
#include "cuda/sm90/backward/tile.h"

namespace tessera::cuda::sm90 {

// All three take BackwardParams.
struct BackwardCode {
  int shared_bytes, rows_shared_bytes;
  bool in_quads;          // the order of statistics, see place_in_quads()
  const void* rows;       // lse2, delta, zeros in dq_sums; grid (slot, query head), 128 threads
  const void* gradients;  // dk, dv, and dq_sums; grid (tiles), BackwardTile::kThreads
  const void* convert;    // dq from dq_sums; grid (slot of dq rows, query head), 128 threads
};

using BackwardKernel = KernelRow<BackwardTile, BackwardCode>;

// All kernels, in the order of backward/table.def.
std::span<const BackwardKernel> backward_kernels();

}  // namespace tessera::cuda::sm90
