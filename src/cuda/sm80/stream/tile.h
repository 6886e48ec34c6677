// SPDX-License-Identifier: Apache-2.0
// The shape of a CTA of stream/kernel.cuh: the columns of stream/table.def. No CUDA header.
#pragma once

#include <cstdint>
#include <span>

#include "cuda/common/rules/kernel.h"

namespace tessera::cuda::sm80 {

// What K and V are stored in: the type of q, or E4M3.
enum class Cache : uint8_t { same, e4m3 };

// Teams of `team` warps take blocks of `keys` keys by turns, each through a ring of `stages` blocks
// of its own. The warps of a team divide the rows.
struct StreamTile {
  int bucket;  // head dims up to this
  int rows;    // queries by heads that share keys
  int warps, team;
  int keys, stages;
  int shared_bytes;  // of a CTA, rounded up
  Cache cache = Cache::same;

  constexpr int threads() const { return 32 * warps; }
  constexpr int teams() const { return warps / team; }
  constexpr int step_keys() const { return teams() * keys; }
};

// Parts that a unit may have, and so CTAs of a grid: two for each multiprocessor of the GPUs of
// today.
constexpr int kMostParts = 296;

struct StreamCode {
  const void* function;
};

using StreamKernel = KernelRow<StreamTile, StreamCode>;

std::span<const StreamKernel> stream_kernels();

}  // namespace tessera::cuda::sm80
