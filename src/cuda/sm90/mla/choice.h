// SPDX-License-Identifier: Apache-2.0
// Which problems run in the kernels for latent attention, and in which row of mla/table.def. No CUDA
// header.
#pragma once

#include "core/problem/problem.h"
#include "cuda/common/work/cut.h"
#include "cuda/sm90/mla/kernels.h"

namespace tessera::cuda::sm90 {

// True of a forward pass whose v is the first 512 of k's 576 columns (TESSERA_V_IN_K), in 16 bits,
// without features, with pages of whole groups of 8 keys or none, and of few queries where others of
// Hopper's kernels could take it.
bool runs_in_mla(const Problem& problem);

// What the units of such a problem are.
CutTile mla_tile_of(const Problem& problem);

// The row that it runs in.
const MlaKernel& mla_kernel_of(const Problem& problem);

// The row for units of so many rows; null: none has these head dims.
const MlaKernel* find_mla_kernel(int dtype, int64_t dqk, int64_t dv, int rows);

// Keys that one box of TMA brings: of a page, or of a block.
int keys_of_box(const Problem& problem);

}  // namespace tessera::cuda::sm90
