// SPDX-License-Identifier: Apache-2.0
// The table of the sm90 backward kernels: what CMake builds, and what the support rules follow from.
#pragma once

namespace tessera::cuda::sm90 {

// A CTA owns tile_n keys: two warpgroups of 64 keys each hold dK and dV, a third makes dQ and feeds them.
struct BackwardTile {
  int dqk, dv;     // head dims up to these; TMA fills the rest with zeros
  int tile_m;      // queries a block
  int dq_columns;  // of dQ that are made at once: what the third warpgroup has registers for
  int registers;   // of a thread that holds dK and dV

  static constexpr int kOwners = 2, kThreads = 128 * (kOwners + 1);
  constexpr int tile_n() const { return 64 * kOwners; }
};

// BACKWARD_TILE(name, dqk, dv, tile_m, dq_columns, registers), in order of preference: a problem runs in
// the first row that holds its head dims. dV, dK, S and dP take 192 registers at d64 and d128; the compiler
// wants 224, and what that leaves for dQ is 32 columns.
#define TESSERA_SM90_BACKWARD(BACKWARD_TILE)    \
  BACKWARD_TILE(d64, 64, 64, 128, 32, 224)      \
  BACKWARD_TILE(d96, 96, 96, 64, 96, 208)       \
  BACKWARD_TILE(d128, 128, 128, 64, 32, 224)

}  // namespace tessera::cuda::sm90
