// SPDX-License-Identifier: Apache-2.0
// The shape of a kernel. The table of those that are built is tiles.def.
#pragma once

#include <cstdint>

namespace tessera::cuda::sm90 {

// What a kernel knows beyond the band, lengths and sinks. A base class of those that use the names.
struct Feature {
  enum : uint32_t {
    kAlibi = 1,
    kSoftcap = 2,
    kDropout = 4,
    kMasks = 8,        // dense masks, key ranges, segments
    kBias = 16,        // any bias, by plain loads
    kEverything = 31,  // all of the above
    kBiasTiles = 32,   // a bias that TMA can read, by tiles
  };
};

// A CTA is one producer warpgroup and `consumers` warpgroups of 64 query rows each.
struct ForwardTile {
  int dqk, dv;  // head dims up to these; TMA fills the rest with zeros
  int tile_n;   // keys a block
  int consumers;
  int k_stages, v_stages;  // of the rings of K and of V
  int q_stages;            // 2: the next tile's queries arrive while this one runs
  bool q_in_registers;     // queries are A registers: QK reads a third less shared memory
  bool o_by_tma;           // through the stage of its queries, which the next tile does not need
  // Groups of 8 keys whose exponentials come before the wait for O; 0: as many as ptxas likes.
  int early_groups;
  int ctas = 1;  // on a multiprocessor at a time

  constexpr int tile_m() const { return 64 * consumers; }
  constexpr int threads() const { return 128 * (consumers + 1); }

  // Registers of a thread. A CTA owns what it was launched with, and what one role claims another
  // must have released: 40 + 2 x 232 = 3 x 168, 32 + 3 x 160 = 4 x 128, 32 + 128 = 2 x 80. A sum
  // above that hangs.
  constexpr int launch_registers() const { return 65536 / (ctas * threads()) / 8 * 8; }
  constexpr int producer_registers() const { return consumers == 2 ? 40 : 32; }
  constexpr int consumer_registers() const {
    return ((consumers + 1) * launch_registers() - producer_registers()) / consumers / 8 * 8;
  }
};

}  // namespace tessera::cuda::sm90
