// SPDX-License-Identifier: Apache-2.0
// Kernel arguments of the forward rows whose keys lie in pages.
#pragma once

#include "cuda/sm90/forward/params.h"

namespace tessera::cuda::sm90 {

// Of ForwardParams, `k` and `v` are the pools: a box is the keys that a page and a block have in
// common. The map of v is ragged with the reach of a page, so that what stands behind the end of a
// sequence in its last page stays there; that of k is plain. Both page tables are there.
struct PagedForwardParams : ForwardParams {
  Divisor page_size;
  int box_keys;   // a power of two
  int box_shift;  // 2^box_shift boxes make a block
  // Sequences of up to so many queries are left to the kernels for decoding; -1: none are.
  int step_queries = -1;
};
static_assert(sizeof(PagedForwardParams) <= 4096, "kernel arguments are 4 KB");

}  // namespace tessera::cuda::sm90
