// SPDX-License-Identifier: Apache-2.0
// The table of the sm90 backward kernels: what CMake builds, and what the support rules follow from.
#pragma once

namespace tessera::cuda::sm90 {

// A CTA owns tile_n keys: two warpgroups of 64 keys each hold dK and dV, a third makes dQ, and one thread
// of a fourth feeds them.
struct BackwardTile {
  int dqk, dv;     // head dims up to these; TMA fills the rest with zeros
  int tile_m;      // queries a block
  int stages;      // of the rings of Q and of dO
  int dq_columns;  // of dQ that are made at once: registers of the third warpgroup
  int registers;   // of a thread that holds dK and dV

  static constexpr int kOwners = 2, kThreads = 128 * (kOwners + 2);
  constexpr int tile_n() const { return 64 * kOwners; }
};

// BACKWARD_TILE(name, dqk, dv, tile_m, stages, dq_columns, registers), in order of preference: a problem
// runs in the first row that holds its head dims.
#define TESSERA_SM90_BACKWARD(BACKWARD_TILE)          \
  BACKWARD_TILE(d64, 64, 64, 128, 3, 64, 216)         \
  BACKWARD_TILE(d96, 96, 96, 64, 3, 96, 208)          \
  BACKWARD_TILE(d128, 128, 128, 64, 3, 64, 216)

}  // namespace tessera::cuda::sm90
