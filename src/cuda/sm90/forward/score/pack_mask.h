// SPDX-License-Identifier: Apache-2.0
// Packs a dense boolean mask for the rich kernel: one bit an element in the order of an accumulator
// fragment, and one state for each block of keys under a row tile.
#pragma once

#include "core/count.h"
#include "cuda/common/launch.h"
#include "cuda/sm90/forward/params.h"
#include "cuda/sm90/forward/tile.h"

namespace tessera::cuda::sm90 {

// Bytes of the bits, before the states: an eighth of the mask's, up to whole blocks.
inline int64_t mask_bits_bytes(const Tensor& mask, const ForwardTile& tile) {
  const Count row = Count{mask.extent[3]}.pieces(tile.tile_n) * (tile.tile_n / 8);
  return (Count{mask.extent[0]} * mask.extent[1] * mask.extent[2] * row).up_to(16).value();
}

// Bytes of workspace, a multiple of 16: bits and states.
inline int64_t packed_mask_bytes(const Tensor& mask, const ForwardTile& tile) {
  const Count states = Count{mask.extent[0]} * mask.extent[1] *
                       Count{mask.extent[2]}.pieces(tile.tile_m()) *
                       Count{mask.extent[3]}.pieces(tile.tile_n);
  return (mask_bits_bytes(mask, tile) + states.up_to(16)).value();
}

// Queues the packing of a.problem's mask into workspace and points `a` to it. The mask has more
// than one row and more than one key.
Status pack_mask(const Tensor& mask, const ForwardTile& tile, void* workspace, ForwardParams& a,
                 cudaStream_t stream);

}  // namespace tessera::cuda::sm90
