// SPDX-License-Identifier: Apache-2.0
// The table of kernels for decoding: a row for each ROW of decode/table.def and each 16-bit type.
#pragma once

#include "cuda/common/rules/kernel.h"

namespace tessera::cuda::sm90 {

// What K and V are stored in: the type of q, or fp8.
enum class DecodeCache : uint8_t { same, e4m3, e5m2 };

// The columns of the table. A CTA is a producer and two teams of four warps, which take blocks of
// keys by turns, each warp a quarter of them for all rows.
struct DecodeTile {
  int bucket;  // head dims up to this
  int rows;    // of a unit: queries by heads
  int stages;  // of blocks of K and V, of each team
  DecodeCache cache = DecodeCache::same;

  static constexpr int kKeys = 64;             // of a block
  static constexpr int kRows[] = {8, 16, 32};  // all that a row of the table may have
  static constexpr int kTeams = 2, kWarpsOfTeam = 4;
  static constexpr int kThreads = 32 * (kTeams * kWarpsOfTeam + 1);
};

struct DecodeCode {
  int shared_bytes;
  const void* function;  // takes DecodeArgs
};

using DecodeKernel = KernelRow<DecodeTile, DecodeCode>;

// All kernels, in the order of decode/table.def.
std::span<const DecodeKernel> decode_kernels();

}  // namespace tessera::cuda::sm90
