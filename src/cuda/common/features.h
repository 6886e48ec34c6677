// SPDX-License-Identifier: Apache-2.0
// What a problem asks of a kernel beyond scale, band, lengths and sinks, and what a kernel knows:
// one set for both folders and both passes. No CUDA header.
//
// Some properties of a kernel are no features, but columns of the tables: that it is deterministic,
// that dbias is summed on the way, and by what means a bias is read.
#pragma once

#include <cstdint>

#include "core/problem/problem.h"

namespace tessera::cuda {

enum Feature : uint32_t {
  kLean = 0,
  kAlibi = 1,
  kSoftcap = 2,
  kDropout = 4,
  kMasks = 8,  // dense masks, key ranges, segments
  kBias = 16,
  kEverything = 31,
  // All that hides is segments. A kernel of this feature alone takes it for granted; all others
  // treat segments as kMasks.
  kSegments = 32,
  // Pages, fp8 keys, and any alignment, bias or mask that a kernel built for one kind of them does
  // not take.
  kOther = 64,
  kGeneral = kEverything | kOther,
};

// The features that the problem has; kSegments beside kMasks. kOther only where shapes and dtypes
// leave no doubt (pages, fp8 keys): each folder adds what its own kernels do not take.
uint32_t features_of(const Problem& problem);

}  // namespace tessera::cuda
