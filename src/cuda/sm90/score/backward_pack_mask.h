// SPDX-License-Identifier: Apache-2.0
// Packs a dense boolean mask for the rich backward kernel: one bit an element in the order of the
// accumulators of S^T, and one state for each block of queries beside a tile of keys.
#pragma once

#include "cuda/common/launch.h"
#include "cuda/sm90/backward/params.h"
#include "cuda/sm90/backward/tile.h"

namespace tessera::cuda::sm90 {

// Bytes of workspace, a multiple of 16: an eighth of the mask's, up to whole blocks, and the
// states.
int64_t packed_backward_mask_bytes(const Tensor& mask, const BackwardTile& tile);

// Queues the packing of a.problem's mask into workspace and points `a` to it. The mask has more
// than one row and more than one key.
Status pack_backward_mask(const Tensor& mask, const BackwardTile& tile, void* workspace,
                          BackwardParams& a, cudaStream_t stream);

}  // namespace tessera::cuda::sm90
