// SPDX-License-Identifier: Apache-2.0
// The small kernels around the backward pass: one value a row before it, sums over rows after it.
#pragma once

#include <cuda_runtime_api.h>

#include <optional>

#include "core/status.h"
#include "cuda/sm80/args.h"

namespace tessera::cuda::sm80 {

// Memory that must be zeros before the next kernel: 16-byte words.
struct Cleared {
  void* data;
  int64_t words;
};

// Queues what computes lse and delta of every row and head, clears `cleared` on the way, and tells
// `order`, if it is not null, whether sequences overlap. Launches nothing if there are no rows. below:
// leaves tiles of kRowsOfStatistics rows out that have no row whose lse, a natural logarithm, is below
// it; of 16 bits, o too.
Status launch_row_statistics(const BackwardArgs& args, Cleared cleared, DqOrder* order,
                             cudaStream_t stream, std::optional<float> below = {});

// Queues dsink[h] = -sum over rows of exp(sink - lse) delta, and dalibi_slopes from slope_rows, as
// far as they are asked for; with TESSERA_ACCUMULATE added to what they hold.
Status launch_row_sums(const BackwardArgs& args, cudaStream_t stream);

}  // namespace tessera::cuda::sm80
