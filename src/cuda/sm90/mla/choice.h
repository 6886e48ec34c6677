// SPDX-License-Identifier: Apache-2.0
// Which problems run in the kernels for latent attention, and in which row of mla/table.def. No CUDA
// header.
#pragma once

#include "core/problem/problem.h"
#include "cuda/common/work/cut.h"
#include "cuda/sm90/mla/kernels.h"

namespace tessera::cuda::sm90 {

// True of a forward pass whose v is the first 512 of k's 576 columns (TESSERA_V_IN_K), q and o in 16
// bits and the cache in the same or E4M3, without features, with pages or none, and of few queries
// where others of Hopper's kernels could take it.
bool runs_in_mla(const Problem& problem);

// True of a row for the problem's types and head dims, whatever its units and pages.
bool has_types_of(const MlaKernel& kernel, const Problem& problem);

// What the units of such a problem are.
CutTile mla_tile_of(const Problem& problem);

// The row that it runs in.
const MlaKernel& mla_kernel_of(const Problem& problem);

// The row for units of so many rows and the problem's pages; null: none has its types and head dims.
const MlaKernel* find_mla_kernel(const Problem& problem, int rows);

}  // namespace tessera::cuda::sm90
