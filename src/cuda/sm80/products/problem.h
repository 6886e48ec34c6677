// SPDX-License-Identifier: Apache-2.0
// precision="fp8" as a problem with columns more, which kernels run that know nothing of it:
// cpu/fp8/products.cc has the equations. No CUDA header.
#pragma once

#include "core/problem/problem.h"
#include "cuda/common/rules/arguments.h"

namespace tessera::cuda::sm80 {

// The columns of the copies:
//
//   q    [ q^  | <q, kbar> | q | 0 ]      v    [ v^  | 0  ]      o   [ o  | 0  ]
//   k    [ k^  |     1     | 0 | k ]      do   [ do^ | do ]
//
// Forward there are but the first ones, in bf16, which has what E4M3 times a power of two makes;
// <q, kbar> is the sum of three. Backward all is fp32. Where no kernel has room for all columns of
// q, k and do themselves, passes have some of them each.
struct WideColumns {
  int64_t means;           // columns of <q, kbar>: 0, 1 or 3
  int64_t first_q, own_k;  // where q's own begin, and how many of q and of k there are in a pass
  int64_t first_do, own_v;
  int64_t dqk, dv;  // of all
  int passes;       // 0: the heads are too wide
};
// most: the widest head of the device's kernels.
WideColumns wide_columns(const Problem& problem, int64_t most);

// The widest head that the kernels of a problem have on a device with so much shared memory.
int64_t widest_head(const Problem& problem, int shared_bytes);

// The problem inside.
Problem wide_problem(const Problem& problem, const WideColumns& columns);

// True if the problem inside writes its own copy of o; if it has copies of the bias and its gradient
// in fp32, since kernels take these in their own type or in fp32.
bool copies_o(const Problem& problem);
bool copies_bias(const Problem& problem);

}  // namespace tessera::cuda::sm80
