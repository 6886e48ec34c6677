// SPDX-License-Identifier: Apache-2.0
// The table of forward kernels: a row for each ROW of forward/table.def and each 16-bit type.
#pragma once

#include "cuda/common/rules/kernel.h"
#include "cuda/sm90/forward/tile.h"

namespace tessera::cuda::sm90 {

struct ForwardCode {
  int shared_bytes;
  const void* function;  // takes ForwardParams
};

using ForwardKernel = KernelRow<ForwardTile, ForwardCode>;

// All kernels, in the order of forward/table.def.
std::span<const ForwardKernel> forward_kernels();

}  // namespace tessera::cuda::sm90
