// SPDX-License-Identifier: Apache-2.0
// The shape of a backward kernel: the columns of backward/table.def.
#pragma once

#include "cuda/common/features.h"

namespace tessera::cuda::sm90 {

// A CTA owns 128 keys: two warpgroups of 64 keys each, and one thread of a third that feeds them.
// Each CTA of a pair (backward/pair/kernel.cuh) owns 64 of them.
struct BackwardTile {
  int dqk, dv;     // head dims up to these; TMA fills the rest with zeros
  int tile_m;      // queries a block
  int ds_buffers;  // blocks of dS that wait for both warpgroups: how far one may run ahead
  bool pair = false;
  int grad_o_stages = 3;       // blocks of dO in shared memory
  bool deterministic = false;  // dq is summed in the same order at every run
  bool sums_dbias = false;     // dbias is summed where dS is (backward/fused/dbias.cuh)
  bool fp8 = false;            // S and dP are products of E4M3 (backward/fused/rounded.cuh)

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
constexpr bool is_plain(const BackwardTile& tile, uint32_t features) {
  return features == kLean && !tile.deterministic && !tile.pair && tile.dqk <= 128;
}
// Which loop is the inner one, over the heads of a group or over blocks of queries, is known at run
// time (BackwardParams::heads_inner). Registers are short for it at 192 columns.
constexpr bool swaps_loops(const BackwardTile& tile, uint32_t features) {
  return features == kLean && !tile.pair && tile.dqk <= 128;
}
// Tiles that are few, or too long, can be shared by several CTAs (backward/fused/share.cuh), unless
// they wait for each other or data masks say which blocks they walk.
constexpr bool can_share(const BackwardTile& tile, uint32_t features) {
  return !(features & (kMasks | kSegments)) && !tile.pair && !tile.deterministic &&
         !tile.sums_dbias;
}
// Tiles convert, too, where sections of heads follow one another (backward/fused/sections.cuh).
// Tiles of 64 columns are short, and take longer than a kernel does.
constexpr bool tiles_convert(const BackwardTile& tile) { return tile.dqk > 64; }

}  // namespace tessera::cuda::sm90
