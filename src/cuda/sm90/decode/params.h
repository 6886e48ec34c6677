// SPDX-License-Identifier: Apache-2.0
// What the kernels for decoding are told: plain data, passed by value as a __grid_constant__.
#pragma once

#include <cuda.h>

#include "cuda/common/few/args.h"

namespace tessera::cuda::sm90 {

struct DecodeArgs : PartsArgs {
  // q: boxes of a unit's rows, queries by heads; k, v: boxes of `box_keys` keys of one head. An E4M3
  // cache counts in pairs of bytes.
  CUtensorMap q, k, v;
  int box_keys;  // divides a block
  int cluster;   // CTAs that share a unit and nothing else, a power of two; 1: work is dealt out
};
static_assert(sizeof(DecodeArgs) <= 4096, "kernel arguments are 4 KB");

}  // namespace tessera::cuda::sm90
