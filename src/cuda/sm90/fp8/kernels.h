// SPDX-License-Identifier: Apache-2.0
// The table of fp8 forward kernels: a row for each ROW of fp8/table.def and each 16-bit type of o,
// which is the row's dtype.
#pragma once

#include "cuda/common/rules/kernel.h"
#include "cuda/sm90/fp8/tile.h"

namespace tessera::cuda::sm90 {

struct Fp8Code {
  int shared_bytes;
  const void* function;  // takes Fp8Params
};

using Fp8Kernel = KernelRow<Fp8Tile, Fp8Code>;

// All kernels, in the order of fp8/table.def.
std::span<const Fp8Kernel> fp8_kernels();

}  // namespace tessera::cuda::sm90
