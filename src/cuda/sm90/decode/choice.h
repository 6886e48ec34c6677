// SPDX-License-Identifier: Apache-2.0
// Which problems run in the kernels for decoding, and in which row of decode/table.def. No CUDA
// header.
#pragma once

#include "core/problem/problem.h"
#include "cuda/common/work/cut.h"
#include "cuda/sm90/decode/kernels.h"

namespace tessera::cuda::sm90 {

// True of a forward pass of few queries without features whose keys and values are of q's 16-bit type
// or E4M3, from pages of whole groups of 8 keys or none.
bool runs_in_decode(const Problem& problem);

// The row for so many rows of queries and heads; null: none has these types and head dims.
const DecodeKernel* find_decode_kernel(const Problem& problem, int64_t rows);

// The row that such a problem runs in, and what its units are there.
const DecodeKernel& decode_kernel_of(const Problem& problem);
CutTile decode_tile_of(const Problem& problem, const DecodeKernel& kernel);

// The row for the decoding steps of a packed batch over pages whose prompts run in forward/: sequences of
// as many queries as a unit of it has at most. Null: there may be no such steps, or no row for them.
const DecodeKernel* kernel_of_steps(const Problem& problem);
int64_t queries_of_step(const Problem& problem, const DecodeKernel& kernel);

// CTAs of a cluster that share a unit and nothing else, so that its parts are summed without memory,
// where all units have as many keys: those of one sequence, or of sequences without lengths. 1: work is
// dealt out.
int decode_cluster_of(const Problem& problem, int multiprocessors);

}  // namespace tessera::cuda::sm90
