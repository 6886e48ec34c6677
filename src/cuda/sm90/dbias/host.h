// SPDX-License-Identifier: Apache-2.0
// dbias and dalibi_slopes on the host: how they are cut into items, what they need of the
// workspace, their launches.
#pragma once

#include <cuda_runtime_api.h>

#include "core/problem/problem.h"
#include "cuda/sm90/backward/params.h"
#include "cuda/sm90/dbias/params.h"

namespace tessera::cuda::sm90 {

// Makes the kernel for these head dims ready, if there is one: all for which the backward pass
// knows a bias have one.
Status prepare_dbias(int dtype, int64_t dqk, int64_t dv);

// 0 where neither is asked for.
int64_t dbias_workspace_bytes(const Problem& problem);

// Queues what is asked for after what has left the statistics of rows (blocks of tile_m) in `rows`.
// workspace: dbias_workspace_bytes(), aligned to 16 bytes.
Status launch_dbias(const Problem& problem, const Buffers& buffers, const Device& device,
                    const BackwardParams& rows, int tile_m, void* workspace);

// out = sum over terms of partial[terms, extent...]; one of the last two extents is 1.
Status launch_dbias_sum(const float* partial, int64_t terms, const int (&extent)[4],
                        const View& out, cudaStream_t stream);

}  // namespace tessera::cuda::sm90
