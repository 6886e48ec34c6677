// SPDX-License-Identifier: Apache-2.0
// The forward pass of the cpu backend, prefill and decode.
#pragma once

#include "core/problem/problem.h"

namespace tessera::cpu {

// Exact, and of the shapes alone; num_threads as in Buffers. O(tokens).
int64_t forward_workspace_bytes(const Problem& problem, int num_threads);

// A validated forward problem in fp32, bf16 or fp16 (k and v also fp8) with a workspace of at least
// that size, 64-byte aligned. Allocates nothing. Results are the same bits for any number of
// threads and any layout.
Status run_forward(const Problem& problem, const Buffers& buffers);

}  // namespace tessera::cpu
