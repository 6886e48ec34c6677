// SPDX-License-Identifier: Apache-2.0
// The built backward kernels: one row for each line of backward_tiles.def and each 16-bit type.
#pragma once

#include <span>

#include "cuda/sm90/backward_params.h"
#include "cuda/sm90/backward_tiles.h"

namespace tessera::cuda::sm90 {

// All three take BackwardParams.
struct BackwardKernel {
  int dtype;     // of q, k, v, o and their gradients
  int features;  // of enum BackwardFeature
  BackwardTile tile;
  int shared_bytes, rows_shared_bytes;
  bool in_quads;          // the order of statistics, see place_in_quads()
  const void* rows;       // lse2, delta, zeros in dq_sums; grid (slot, query head), 128 threads
  const void* gradients;  // dk, dv, and dq_sums; grid (tiles), BackwardTile::kThreads
  const void* convert;    // dq from dq_sums; grid (slot of dq rows, query head), 128 threads
};

// In the order of backward_tiles.def.
std::span<const BackwardKernel> backward_kernels();

}  // namespace tessera::cuda::sm90
