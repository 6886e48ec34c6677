// SPDX-License-Identifier: Apache-2.0
// The built kernels: one row for each line of tiles.def and each 16-bit type.
#pragma once

#include <span>

#include "cuda/sm90/params.h"
#include "cuda/sm90/tiles.h"

namespace tessera::cuda::sm90 {

struct Kernel {
  int dtype;          // of q, k, v, o
  uint32_t features;  // of Feature
  ForwardTile tile;
  int shared_bytes;
  const void* function;  // takes ForwardParams
};

// In the order of tiles.def.
std::span<const Kernel> kernels();

}  // namespace tessera::cuda::sm90
