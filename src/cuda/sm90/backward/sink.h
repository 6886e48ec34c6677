// SPDX-License-Identifier: Apache-2.0
// dsink: what the backward pass gives to the sinks.
#pragma once

#include <cuda_runtime_api.h>

#include "core/status.h"
#include "cuda/sm90/backward/params.h"

namespace tessera::cuda::sm90 {

// dsink[h] = -sum over rows of exp(sink - lse) delta, deterministic, from the statistics in the
// workspace. Queues on the stream; nothing without a DSINK tensor.
Status launch_dsink(const BackwardParams& params, int tile_m, cudaStream_t stream);

}  // namespace tessera::cuda::sm90
