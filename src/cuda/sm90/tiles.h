// SPDX-License-Identifier: Apache-2.0
// The table of the sm90 kernels: what CMake builds, what the support rules follow from, and why.
#pragma once

namespace tessera::cuda::sm90 {

// A CTA is one producer warpgroup and `consumers` warpgroups of 64 query rows each.
struct ForwardTile {
  int dqk, dv;          // head dims up to these; TMA fills the rest with zeros
  int tile_n;           // keys a block
  int consumers;
  int stages;           // of the ring of K and of the ring of V
  int q_stages;         // 2: the next tile's queries arrive while this one runs
  bool q_in_registers;  // queries are A registers: QK reads a third less shared memory
  int early_groups;     // of 8 keys whose exponentials come before the wait for O

  constexpr int tile_m() const { return 64 * consumers; }
  constexpr int threads() const { return 128 * (consumers + 1); }
};

// TILE(name, rich, dqk, dv, tile_n, consumers, stages, q_stages, q_in_registers, early_groups)
// In order of preference: a problem runs in the first row that holds its head dims. Rich rows understand
// bias, masks, ALiBi, softcap and dropout; the others the band, lengths and sinks.
#define TESSERA_SM90_FORWARD(TILE)                           \
  TILE(d64, false, 64, 64, 128, 3, 2, 2, false, 2)           \
  TILE(d96, false, 96, 96, 160, 2, 2, 1, true, 2)            \
  TILE(d128, false, 128, 128, 128, 2, 2, 2, false, 2)        \
  TILE(d192_128, false, 192, 128, 128, 2, 2, 1, false, 2)    \
  TILE(d192, false, 192, 192, 96, 2, 2, 1, false, 2)         \
  TILE(d256, false, 256, 256, 80, 2, 2, 1, false, 2)         \
  /* A packed mask is an eighth of the dense one only if 64 divides tile_n. */ \
  TILE(rich_d64, true, 64, 64, 128, 2, 2, 2, false, 2)       \
  TILE(rich_d96, true, 96, 96, 128, 2, 2, 2, false, 2)       \
  TILE(rich_d128, true, 128, 128, 128, 2, 2, 2, false, 2)    \
  TILE(rich_d192_128, true, 192, 128, 128, 2, 2, 1, false, 2)\
  TILE(rich_d256, true, 256, 256, 64, 2, 2, 1, false, 2)

}  // namespace tessera::cuda::sm90
