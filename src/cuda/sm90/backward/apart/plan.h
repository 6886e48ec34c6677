// SPDX-License-Identifier: Apache-2.0
// The backward pass in two kernels (backward/apart/kernels.h), as the plan of the backward pass
// sees it.
#pragma once

#include "core/choose/backend.h"
#include "cuda/sm90/backward/apart/params.h"

namespace tessera::cuda::sm90 {

Status prepare_two(const TwoKernels& kernels);
int64_t two_workspace_bytes(const TwoKernels& kernels, const Problem& problem);
// Runs a problem with the band, lengths and sinks alone, of which dq, dk and dv are given.
Status run_two(const TwoKernels& kernels, int multiprocessors, const Problem& problem,
               const Buffers& buffers);

}  // namespace tessera::cuda::sm90
