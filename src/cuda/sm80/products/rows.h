// SPDX-License-Identifier: Apache-2.0
// The rows of the problem inside, with the columns of products/problem.h.
#pragma once

#include "cuda/common/launch.h"
#include "cuda/common/quantise/rounded.h"
#include "cuda/sm80/products/problem.h"

namespace tessera::cuda::sm80 {

// Writes the copy of q, k, v, o or do, for pass `pass`; rows outside of sequences are left alone.
Status launch_wide(const Problem& problem, const Params& params, const Rounded& rounded,
                   const WideColumns& columns, int pass, int index, const View& to,
                   cudaStream_t stream);

}  // namespace tessera::cuda::sm80
