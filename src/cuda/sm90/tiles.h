// SPDX-License-Identifier: Apache-2.0
// The shape of a kernel. The table of those that are built is tiles.def.
#pragma once

namespace tessera::cuda::sm90 {

// A CTA is one producer warpgroup and `consumers` warpgroups of 64 query rows each.
struct ForwardTile {
  int dqk, dv;  // head dims up to these; TMA fills the rest with zeros
  int tile_n;   // keys a block
  int consumers;
  int stages;           // of the ring of K and of the ring of V
  int q_stages;         // 2: the next tile's queries arrive while this one runs
  bool q_in_registers;  // queries are A registers: QK reads a third less shared memory
  int early_groups;     // of 8 keys whose exponentials come before the wait for O

  constexpr int tile_m() const { return 64 * consumers; }
  constexpr int threads() const { return 128 * (consumers + 1); }
};

}  // namespace tessera::cuda::sm90
