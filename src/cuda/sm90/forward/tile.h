// SPDX-License-Identifier: Apache-2.0
// The shape of a kernel: the columns of forward/table.def.
#pragma once

namespace tessera::cuda::sm90 {

// A CTA is one producer warpgroup and `consumers` warpgroups of 64 query rows each.
struct ForwardTile {
  int dqk, dv;  // head dims up to these; TMA fills the rest with zeros
  int tile_n;   // keys a block
  int consumers;
  int k_stages, v_stages;  // of the rings of K and of V
  int q_stages;            // 2: the next tile's queries arrive while this one runs
  // Queries are A registers: QK reads a third less shared memory.
  bool q_in_registers = false;
  bool o_by_tma = false;  // through the stage of its queries, which the next tile does not need
  // Groups of 8 keys whose exponentials come before the wait for O; 0: as many as ptxas likes.
  int early_groups = 0;
  int ctas = 1;  // on a multiprocessor at a time
  // A kernel of kBias takes, besides a bias that TMA can read, any other by plain loads.
  bool loads_bias = false;
  // How many heads a tile has. More than one share their keys, and each consumer has its share of
  // them, one head's rows below another's; all consumers have rows of a single one.
  int heads = 1;
  bool pages = false;  // K and V lie in pages
  // A tile's keys are cut into parts, an o in fp32 each, which are merged behind this kernel.
  bool parts = false;
  bool e4m3 = false;  // K and V are E4M3, which the loaders convert to the type of q

  constexpr int tile_m() const { return 64 * consumers / heads; }
  constexpr int threads() const { return 128 * (consumers + 1); }

  // Registers of a thread. A CTA owns what it was launched with, and what one role claims another
  // must have released: 40 + 2 x 232 = 3 x 168, 32 + 3 x 160 = 4 x 128, 32 + 128 = 2 x 80. A sum
  // above that hangs.
  constexpr int launch_registers() const { return 65536 / (ctas * threads()) / 8 * 8; }
  // Loaders that convert need more: 72 + 2 x 216.
  constexpr int producer_registers() const { return e4m3 ? 72 : consumers == 2 ? 40 : 32; }
  constexpr int consumer_registers() const {
    return ((consumers + 1) * launch_registers() - producer_registers()) / consumers / 8 * 8;
  }
};

}  // namespace tessera::cuda::sm90
