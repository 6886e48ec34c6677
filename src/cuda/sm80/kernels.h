// SPDX-License-Identifier: Apache-2.0
// The tables of kernels: a row for each ROW of a table.def and each of its element types, in order,
// buckets ascending.
#pragma once

#include "cuda/common/rules/kernel.h"
#include "cuda/sm80/tiles.h"

namespace tessera::cuda::sm80 {

struct Code {
  const void* function;
  const void* finish = nullptr;   // of a fused loop: what turns the sums of dQ into dq
  const void* in_turn = nullptr;  // of one without features: adds in a fixed order, or makes no dQ
  const void* of_low = nullptr;   // of dQ, 16 bits, heads up to 256: tiles with a low row alone
};

using Kernel = KernelRow<Tile, Code>;

std::span<const Kernel> forward_kernels();
std::span<const Kernel> decode_kernels();
std::span<const Kernel> backward_kernels();

}  // namespace tessera::cuda::sm80
