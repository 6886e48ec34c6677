// SPDX-License-Identifier: Apache-2.0
// The built kernels for wide heads: one row for each line of wide_tiles.def and each 16-bit type.
#pragma once

#include <span>

#include "cuda/sm90/params.h"

namespace tessera::cuda::sm90 {

// A CTA is a producer and two consumer warpgroups, which share its queries.
struct WideTile {
  int dqk, dv;  // head dims up to these; whole chunks of 64 columns of q and k beyond are left out
  int ctas;     // of a cluster, which has the keys in common
  int stages;   // of 16 KB

  static constexpr int kRows = 64;          // of a CTA
  static constexpr int kTileN = 128;        // keys a block
  static constexpr int kKeys = kTileN / 2;  // of a consumer and a box of k
  static constexpr int kValues = 32;        // keys a box of v
  static constexpr int kThreads = 384;

  constexpr int tile_m() const { return kRows * ctas; }
};

struct WideKernel {
  int dtype;  // of q, k, v, o
  WideTile tile;
  int shared_bytes;
  const void* function;  // takes ForwardParams
};

// In the order of wide_tiles.def.
std::span<const WideKernel> wide_kernels();

}  // namespace tessera::cuda::sm90
