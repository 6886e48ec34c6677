// SPDX-License-Identifier: Apache-2.0
// The shape of a kernel's CTA; tiles.def lists them.
#pragma once

#include "core/philox.h"  // TESSERA_HOST_DEVICE

namespace tessera::cuda::sm80 {

// `warps` warps of 16 x row_tiles rows each on the resident side, the other side in steps of
// `step`. `sharing` warps have the same rows.
struct Tile {
  int row_tiles, warps, step, sharing = 1;

  constexpr int rows() const { return 16 * row_tiles * warps / sharing; }
  constexpr int threads() const { return 32 * warps; }
};

// What a problem has beside scale and band. A kernel is compiled for a set of these: for none, for
// one, which it then takes for granted, or for those of several that it is given.
enum Feature : unsigned {
  kBias = 1,  // after the scale, of the type of q, rows of keys aligned to 16 bytes
  kSoftcap = 2,
  kAlibi = 4,
  kMasks = 8,  // a mask of queries by keys, key ranges, segments
  kDropout = 16,
  kOther = 32,  // pages, fp8, any other alignment, bias or mask
};
inline constexpr unsigned kShapes = 31;  // all but kOther
inline constexpr unsigned kEveryFeature = 63;

// Rows of queries and packed heads of a CTA of the decode pass: one row tile, shared by all warps.
inline constexpr int kDecodeRows = 16;

// Whether one CTA of the pass over keys makes dK and dV: the registers of 16 rows hold twice 128
// columns.
TESSERA_HOST_DEVICE constexpr bool makes_both(int bucket) { return bucket <= 128; }

// Columns of an output that one CTA accumulates: wider ones are cut, each piece computing S again.
constexpr int output_columns(int bucket) { return bucket <= 256 ? bucket : 192; }

}  // namespace tessera::cuda::sm80
