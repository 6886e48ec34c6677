// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "core/problem/problem.h"

namespace tessera::cpu {

// Problems with precision="fp8": scores, what they weigh and dP are those of q, k, v and do as the
// quantiser (core/quantise) rounds them; gradients are of the caller's own q, k and do. Computed in
// fp32, with copies of q, k, v, o and do in the workspace: 4 bytes an element forward, some 12 of q
// and k and 8 of the others backward.
int64_t products_workspace_bytes(const Problem& problem, int num_threads);
Status run_products(const Problem& problem, const Buffers& buffers);

}  // namespace tessera::cpu
