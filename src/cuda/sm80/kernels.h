// SPDX-License-Identifier: Apache-2.0
// The built kernels: one row for each line of tiles.def and each element type of its size.
#pragma once

#include <span>

#include "cuda/sm80/tiles.h"

namespace tessera::cuda::sm80 {

enum class Pass { forward, decode, backward_dq, backward_dkdv, backward_fused, backward_dbias };

struct Kernel {
  Pass pass;
  unsigned features;  // enum Feature; what it applies, or of kEveryFeature what it may be asked for
  int dtype;          // of q
  int bucket;         // head dims up to this
  Tile tile;
  int shared_bytes;
  const void* function;
  const void* finish = nullptr;   // of backward_fused: what turns the sums of dQ into dq
  const void* in_turn = nullptr;  // of backward_fused: adds in a fixed order, or makes no dQ
  bool plain = false;             // fp32 by multiply-adds
  bool large = false;             // has no code for GPUs with less than kLargeSharedBytes
};

// Of shared memory, a CTA: sm80 has 163 KB, sm90 and sm100 227.
inline constexpr int kLargeSharedBytes = 200 * 1024;

// In the table's order, buckets ascending.
std::span<const Kernel> kernels();

}  // namespace tessera::cuda::sm80
