// SPDX-License-Identifier: Apache-2.0
// Which row of forward/table.def a problem runs in. No GPU is asked; no CUDA header.
#pragma once

#include "core/problem/problem.h"
#include "cuda/common/params.h"
#include "cuda/sm90/forward/kernels.h"

namespace tessera::cuda::sm90 {

constexpr int kMostHeadsOfTile = 8;

// What is asked of a kernel.
struct ForwardNeeds {
  uint32_t features;        // of Feature
  bool loads_bias = false;  // the bias is one that TMA cannot read
  bool pages = false;       // keys and values lie in pages
  int heads = 1;            // of a tile: up to kMostHeadsOfTile
  bool parts = false;       // of a tile's keys
  bool e4m3 = false;        // keys and values are E4M3
};

// The kernel that knows these and has the least head dims of those that hold these; the first such
// row of the table whose tiles have at most so many consumers. Null: none.
const ForwardKernel* find_forward_kernel(const ForwardNeeds& needs, int dtype, int64_t dqk,
                                         int64_t dv, int most_consumers = 3);

// Consumers of the rows of the table that are chosen for short problems.
constexpr int kConsumersOfLowTile = 2, kConsumersOfLoneTile = 1;

// The row with the tallest tiles, for a problem that the backend supports. bias: the address of its
// elements, or null.
const ForwardKernel& tall_kernel_of(const Problem& problem, const void* bias, float scale);

// True of a forward pass over pages that a row of the table reads: keys and values of q's
// type or E4M3, without features, and no sum whose order must not depend on how a prompt is cut.
bool reads_pages(const Problem& problem);
// The keys of a box of such a problem; 0: rows are copied one by one.
int keys_of_boxes(const Problem& problem, const ForwardTile& tile);

// How many heads a tile of such a problem has, if it has no features, of keys that come by boxes.
int heads_that_share_keys(const Problem& problem);

// The row with the same features and head dims and as many rows a tile as suit the problem.
const ForwardKernel& with_rows(const Params& p, const ForwardKernel& tall, int multiprocessors);

// Into how many parts the keys of each tile are cut in such a row; 1: they are not.
int parts_of_tile(const Params& p, const ForwardTile& tile, int multiprocessors);

// The kernel of 128 columns, for head dims of 65 to 96 that have one of their own: with_rows() takes it
// where sequences are short under a diagonal. Null for other head dims.
const ForwardKernel* kernel_of_more_columns(int dtype, int64_t dqk, int64_t dv);

}  // namespace tessera::cuda::sm90
