// SPDX-License-Identifier: Apache-2.0
// The backward pass in two kernels (backward/apart/kernels.h), as the plan of the backward pass
// sees it.
#pragma once

#include "core/choose/backend.h"
#include "cuda/sm90/backward/apart/params.h"

namespace tessera::cuda::sm90 {

Status prepare_apart(const ApartKernels& kernels);
int64_t apart_workspace_bytes(const ApartKernels& kernels, const Problem& problem);
// Runs a problem with the band, lengths and sinks alone, of which dq, dk and dv are given.
Status run_apart(const ApartKernels& kernels, int multiprocessors, const Problem& problem,
                 const Buffers& buffers);

}  // namespace tessera::cuda::sm90
