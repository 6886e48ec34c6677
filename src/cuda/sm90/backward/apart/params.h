// SPDX-License-Identifier: Apache-2.0
// Arguments of the two kernels.
#pragma once

#include "cuda/sm90/backward/apart/kernels.h"
#include "cuda/sm90/backward/params.h"
#include "cuda/sm90/forward/params.h"

namespace tessera::cuda::sm90 {

// Arguments of dq's kernel. `problem` and o are those of a forward pass whose o is dq and which has
// neither lse nor sinks; k and v are ragged where lengths are given.
struct DqParams : ForwardParams {
  CUtensorMap grad_o, forward_o;
  View lse, grad_lse;
  int slots;            // of one head, of rows_of_block() each
  float *lse2, *delta;  // as in BackwardParams, for the second kernel
};
static_assert(sizeof(DqParams) <= 4096, "kernel arguments are 4 KB");

// Arguments of the kernel of dk and dv. All maps have boxes of kRowsOfBox rows; grad_k and grad_v
// are ragged where keys are packed.
struct DkdvParams : BackwardParams {
  TileCounter* counter;
  uint64_t mark;
};
static_assert(sizeof(DkdvParams) <= 4096, "kernel arguments are 4 KB");

}  // namespace tessera::cuda::sm90
