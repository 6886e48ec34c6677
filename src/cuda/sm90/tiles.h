// SPDX-License-Identifier: Apache-2.0
// The table of the sm90 kernels: what is built, and what the support rules follow from.
#pragma once

namespace tessera::cuda::sm90 {

// A CTA is one producer warpgroup and `consumers` warpgroups of 64 query rows each.
struct ForwardTile {
  int dqk, dv;
  int tile_n;           // keys a block
  int consumers;
  int stages;           // of the K ring and of the V ring
  int q_stages;         // 2: the next tile's queries arrive while this one runs
  bool q_in_registers;  // queries are A registers: QK reads a third less shared memory
  int early_groups;     // of 8 keys whose exponentials come before the wait for O

  constexpr int tile_m() const { return 64 * consumers; }
  constexpr int threads() const { return 128 * (consumers + 1); }
};

}  // namespace tessera::cuda::sm90
