// SPDX-License-Identifier: Apache-2.0
// Kernel arguments of the fp8 forward kernels: plain data, passed by value as a __grid_constant__.
#pragma once

#include "cuda/common/quantise/rounded.h"
#include "cuda/sm90/forward/params.h"
#include "cuda/sm90/fp8/keys.h"

namespace tessera::cuda::sm90 {

// The maps count in pairs of bytes, as TMA has types of 16 bits elsewhere. `v` maps V^T.
struct Fp8Params : ForwardParams {
  View q_scale, k_scale, v_scale;  // [b|1, h|1, n|1] fp32, n for q alone; null: 1
  int q_scale_block;               // rows of q that share a scale; 0: all of a sequence
  int last_q_block;
  Rounded rounded;   // in place of these scales, in rows of the table that are by_blocks
  uint32_t* amax_o;  // bits of the largest |o|; null: not asked
};
static_assert(sizeof(Fp8Params) <= 4096, "kernel arguments are 4 KB");

// V^T in the workspace, [b, hk, dv, keys] bytes; see fp8/transpose.h.
struct TransposeParams {
  Params problem;
  uint8_t* to;
  int64_t stride_head, stride_batch;
  int keys;  // the extent, a multiple of 16
};

}  // namespace tessera::cuda::sm90
