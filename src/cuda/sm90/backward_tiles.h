// SPDX-License-Identifier: Apache-2.0
// The shape of a backward kernel. The table of those that are built is backward_tiles.def.
#pragma once

namespace tessera::cuda::sm90 {

// A CTA owns tile_n keys: two warpgroups of 64 keys each, and one thread of a third that feeds them.
struct BackwardTile {
  int dqk, dv;     // head dims up to these; TMA fills the rest with zeros
  int tile_m;      // queries a block
  int ds_buffers;  // blocks of dS that wait for both warpgroups: how far one may run ahead

  static constexpr int kOwners = 2, kThreads = 128 * (kOwners + 1);
  constexpr int tile_n() const { return 64 * kOwners; }
};

}  // namespace tessera::cuda::sm90
