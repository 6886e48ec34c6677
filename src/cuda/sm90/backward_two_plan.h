// SPDX-License-Identifier: Apache-2.0
// The backward pass in two kernels (backward_two.h), as the plan of the backward pass sees it.
#pragma once

#include "core/backend.h"
#include "cuda/sm90/backward_two.h"

namespace tessera::cuda::sm90 {

// Null: none is built for these head dims.
const TwoKernels* find_two_kernels(int dtype, int64_t dqk, int64_t dv);
Status prepare_two(const TwoKernels& kernels);
int64_t two_workspace_bytes(const TwoKernels& kernels, const Problem& problem);
// Of a problem with the band, lengths and sinks alone, of which dq, dk and dv are given.
Status run_two(const TwoKernels& kernels, int multiprocessors, const Problem& problem,
               const Buffers& buffers);

}  // namespace tessera::cuda::sm90
