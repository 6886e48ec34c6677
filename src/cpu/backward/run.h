// SPDX-License-Identifier: Apache-2.0
// The backward pass, host side.
#pragma once

#include "core/problem/problem.h"

namespace tessera::cpu {

// Exact, O(tokens): the gradients that need it in fp32 partial sums, and a scratch for each worker.
// num_threads as in Buffers.
int64_t backward_workspace_bytes(const Problem& problem, int num_threads);

// problem and buffers are validated. The same bits for any number of threads. Allocates nothing,
// does not throw, may run from several threads at once.
void run_backward(const Problem& problem, const Buffers& buffers);

}  // namespace tessera::cpu
