// SPDX-License-Identifier: Apache-2.0
// The shape of a backward kernel. The table of those that are built is backward_tiles.def.
#pragma once

namespace tessera::cuda::sm90 {

// What a kernel knows beyond the band, lengths and sinks.
enum BackwardFeature {
  kAlibi = 1,
  kSoftcap = 2,
  kDropout = 4,
  kMasks = 8,  // dense masks, key ranges, segments
  kBias = 16,
  kEverything = 31,
  // dq is summed in a fixed order: not a feature of scores, but a kernel of its own.
  kDeterministic = 32,
  kEverythingDeterministic = 63,
  // dbias is summed where dS is (backward_dbias.cuh): a kernel of its own, too.
  kGradientOfBias = 64,
  // Of kMasks segments alone (backward_segments.cuh): a kernel of its own as well.
  kSegments = 128,
  kAllBits = 255,
};

// A CTA owns 128 keys: two warpgroups of 64 keys each, and one thread of a third that feeds them.
// Of a pair (backward_pair.cuh) each CTA owns 64 of them.
struct BackwardTile {
  int dqk, dv;     // head dims up to these; TMA fills the rest with zeros
  int tile_m;      // queries a block
  int ds_buffers;  // blocks of dS that wait for both warpgroups: how far one may run ahead
  bool pair = false;
  int grad_o_stages = 3;  // blocks of dO in shared memory

  static constexpr int kOwners = 2, kThreads = 128 * (kOwners + 1);
  constexpr int tile_n() const { return 64 * kOwners; }
  constexpr int ctas() const { return pair ? 2 : 1; }  // of a cluster, which owns a tile
  // Sums of a block of dQ come in parts of 64 rows: its halves, or its chunks of columns.
  constexpr int parts_of_dq() const { return dqk > 128 ? (dqk + 63) / 64 : kOwners; }
  constexpr int columns_of_dq() const { return !pair && tile_m == 64 && dqk == 64 ? 32 : 64; }
  constexpr int sums_of_dq() const { return parts_of_dq() * 64 * columns_of_dq(); }  // of a block
};

// The lean kernel in any order: nothing but the band, lengths and sinks, and dQ is not cut in
// three.
constexpr bool is_plain(const BackwardTile& tile, int features) {
  return features == 0 && !tile.pair && tile.dqk <= 128;
}
// Which loop is the inner one, over the heads of a group or over blocks of queries, is known at run
// time (BackwardParams::heads_inner). At 192 columns registers are short for it.
constexpr bool swaps_loops(const BackwardTile& tile, int features) {
  return is_plain(tile, features & ~kDeterministic);
}
// Where sections of heads follow one another (backward_sections.cuh), tiles convert, too. At 64
// columns they are short, and it takes longer than by a kernel.
constexpr bool tiles_convert(const BackwardTile& tile) { return tile.dqk > 64; }

}  // namespace tessera::cuda::sm90
