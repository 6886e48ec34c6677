// SPDX-License-Identifier: Apache-2.0
// What rules ask of a GPU. No CUDA header.
#pragma once

#include "core/problem/problem.h"

namespace tessera::cuda {

struct DeviceTraits {
  int arch;  // 90; 0: nobody knows
  int multiprocessors;
  int shared_bytes;  // that a CTA may have
};

// The traits of a GPU that need not be here, by device.arch alone.
DeviceTraits imagined_traits(const Device& device);

}  // namespace tessera::cuda
