// SPDX-License-Identifier: Apache-2.0
// Packs a dense boolean mask for the rich kernel: one bit an element in the order of an accumulator
// fragment, and one state for each block of keys under a row tile.
#pragma once

#include "cuda/common/launch.h"
#include "cuda/sm90/forward/params.h"
#include "cuda/sm90/forward/tile.h"

namespace tessera::cuda::sm90 {

// Bytes of workspace, a multiple of 16: an eighth of the mask's, up to whole blocks, and the
// states.
int64_t packed_mask_bytes(const Tensor& mask, const ForwardTile& tile);

// Queues the packing of a.problem's mask into workspace and points `a` to it. The mask has more
// than one row and more than one key.
Status pack_mask(const Tensor& mask, const ForwardTile& tile, void* workspace, ForwardParams& a,
                 cudaStream_t stream);

}  // namespace tessera::cuda::sm90
