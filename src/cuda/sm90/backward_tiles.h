// SPDX-License-Identifier: Apache-2.0
// The table of the sm90 backward kernels: what CMake builds, and what the support rules follow from.
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

// BACKWARD_TILE(name, dqk, dv, tile_m, ds_buffers), in order of preference: a problem runs in the first row
// that holds its head dims. dV, dK, S and dP take 192 of 240 registers at d64 and d128.
#define TESSERA_SM90_BACKWARD(BACKWARD_TILE) \
  BACKWARD_TILE(d64, 64, 64, 128, 2)         \
  BACKWARD_TILE(d96, 96, 96, 64, 3)          \
  BACKWARD_TILE(d128, 128, 128, 64, 3)

}  // namespace tessera::cuda::sm90
