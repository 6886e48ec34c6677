// SPDX-License-Identifier: Apache-2.0
// The small kernels around the backward pass: one value a row before it, sums over rows after it.
#pragma once

#include <cuda_runtime_api.h>

#include "core/status.h"
#include "cuda/sm80/args.h"

namespace tessera::cuda::sm80 {

// Memory that must be zeros before the next kernel: 16-byte words.
struct Cleared {
  void* data;
  int64_t words;
};

// lse and delta of every row and head, and zeros on the way. order: null, or told whether sequences
// overlap. plain: for kernels that multiply fp32 by multiply-adds. Nothing is launched where there
// are no rows.
Status launch_row_statistics(const BackwardArgs& args, Cleared cleared, DqOrder* order, bool plain,
                             cudaStream_t stream);

// dsink[h] = -sum over rows of exp(sink - lse) delta, and dalibi_slopes from slope_rows; each if
// asked.
Status launch_row_sums(const BackwardArgs& args, cudaStream_t stream);

}  // namespace tessera::cuda::sm80
