// SPDX-License-Identifier: Apache-2.0
// How stream/kernel.cuh runs a problem.
#pragma once

#include "core/choose/backend.h"
#include "cuda/common/launch.h"
#include "cuda/sm80/stream/tile.h"

namespace tessera::cuda::sm80 {

// Allows the kernel its shared memory on the current device.
Status prepare(const StreamKernel& kernel);

int64_t stream_workspace_bytes(const Problem& problem, const StreamKernel& kernel,
                               const DeviceInfo& device);

// Queues the one launch; params: those of the call, with sequences and queries.
Status run_stream(const Problem& problem, const Buffers& buffers, const Params& params,
                  const StreamKernel& kernel, const DeviceInfo& device, cudaStream_t stream);

}  // namespace tessera::cuda::sm80
