// SPDX-License-Identifier: Apache-2.0
// The shape of a kernel's CTA: the columns of forward/, decode/ and backward/table.def.
#pragma once

#include <cstdint>

#include "core/mask/philox.h"  // TESSERA_HOST_DEVICE

namespace tessera::cuda::sm80 {

// The code that a row is an instance of: make_<loop>() in the file <loop>.cuh of the table's
// folder.
enum class Loop : uint8_t { lean, general, decode, dq, dkdv, dbias, fused, fused_lean };

// The types that a row is built for: bf16 and fp16, or fp32, whose products are three of fp16.
enum class Elements : uint8_t { two_bytes, fp32 };

// The GPUs that a row is built for. large: those with 227 KB of shared memory, which most such rows
// need, and no other. small: those on which the row before does not fit, which sm90 is not.
enum class Gpus : uint8_t { all, large, small };

// A CTA keeps the rows of one side, 16 x row_tiles for each of `warps` warps, and walks the other
// side in steps of `step` rows.
struct Tile {
  Loop loop;
  Elements elements = Elements::two_bytes;
  int bucket;  // head dims up to this
  int row_tiles = 1, warps, step;
  int sharing = 1;   // warps that have the same rows
  int stages = 1;    // buffers of dO in shared memory
  int shared_bytes;  // of a CTA, rounded up (holds)
  Gpus gpus = Gpus::all;

  constexpr int rows() const { return 16 * row_tiles * warps / sharing; }
  constexpr int threads() const { return 32 * warps; }
};

// True if a row's shared_bytes fit the storage of its kernel: multiples of 512, so that one more
// word in a tile is not an edit of every row.
template <typename Storage>
constexpr bool holds(const Tile& tile) {
  const int bytes = sizeof(Storage);
  return bytes <= tile.shared_bytes && tile.shared_bytes - bytes < 1024;
}

// Rows of queries and packed heads of a CTA of the decode pass: one row tile, shared by all warps.
inline constexpr int kDecodeRows = 16;

// True if one CTA of the pass over keys makes both dK and dV: registers hold 16 rows of twice 128
// columns.
TESSERA_HOST_DEVICE constexpr bool makes_both(int bucket) { return bucket <= 128; }

// Columns of an output that one CTA accumulates. A wider one is cut, and each piece computes S
// again.
constexpr int output_columns(int bucket) { return bucket <= 256 ? bucket : 192; }

}  // namespace tessera::cuda::sm80
