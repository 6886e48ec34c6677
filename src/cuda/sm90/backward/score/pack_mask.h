// SPDX-License-Identifier: Apache-2.0
// Packs a dense boolean mask for the rich backward kernel: one bit an element in the order of the
// accumulators of S^T, and one state for each block of queries beside a tile of keys.
#pragma once

#include "core/count.h"
#include "cuda/common/launch.h"
#include "cuda/sm90/backward/params.h"
#include "cuda/sm90/backward/tile.h"

namespace tessera::cuda::sm90 {

constexpr int kKeysOfPiece = 128, kQueriesOfPiece = 64;  // that a CTA packs at a time

// Bytes of the bits, before the states: an eighth of the mask's, up to whole pieces.
inline int64_t backward_mask_bits_bytes(const Tensor& mask) {
  constexpr int kBytesOfPiece = kQueriesOfPiece * kKeysOfPiece / 8;
  return (Count{mask.extent[0]} * mask.extent[1] * Count{mask.extent[2]}.pieces(kQueriesOfPiece) *
          Count{mask.extent[3]}.pieces(kKeysOfPiece) * kBytesOfPiece)
      .value();
}

// Bytes of workspace, a multiple of 16: bits and states.
inline int64_t packed_backward_mask_bytes(const Tensor& mask, const BackwardTile& tile) {
  const Count states = Count{mask.extent[0]} * mask.extent[1] *
                       Count{mask.extent[2]}.pieces(tile.tile_m) *
                       Count{mask.extent[3]}.pieces(kKeysOfPiece);
  return (backward_mask_bits_bytes(mask) + states.up_to(16)).value();
}

// Queues the packing of a.problem's mask into workspace and points `a` to it. The mask has more
// than one row and more than one key.
Status pack_backward_mask(const Tensor& mask, const BackwardTile& tile, void* workspace,
                          BackwardParams& a, cudaStream_t stream);

}  // namespace tessera::cuda::sm90
