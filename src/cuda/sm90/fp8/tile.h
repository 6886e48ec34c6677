// SPDX-License-Identifier: Apache-2.0
// The shape of a kernel: the columns of fp8/table.def.
#pragma once

#include "cuda/sm90/forward/tile.h"

namespace tessera::cuda::sm90 {

// A CTA is one producer warpgroup and `consumers` warpgroups of 64 query rows each.
struct Fp8Tile {
  int dqk, dv;  // head dims up to these; TMA fills the rest with zeros
  int consumers;
  int k_stages, v_stages, q_stages;
  // l is the sum of P before it is rounded, so that lse is that of the scores. Without it, the sum
  // of the rounded P by a row of ones under V^T: as good for o, but lse has P's rounding.
  bool exact_sum;
  // Scales are the quantiser's, of rows and blocks of keys (Fp8Params).
  bool by_blocks = false;

  static constexpr int tile_n = 128;
  static constexpr bool o_by_tma = false;
  constexpr int tile_m() const { return 64 * consumers; }
  constexpr int threads() const { return 128 * (consumers + 1); }
  constexpr int producer_registers() const { return as_forward().producer_registers(); }
  constexpr int consumer_registers() const { return as_forward().consumer_registers(); }

 private:
  constexpr ForwardTile as_forward() const {
    return {.dqk = dqk,
            .dv = dv,
            .tile_n = tile_n,
            .consumers = consumers,
            .k_stages = k_stages,
            .v_stages = v_stages,
            .q_stages = q_stages};
  }
};

}  // namespace tessera::cuda::sm90
