// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "core/problem/problem.h"

namespace tessera::cpu {

// Problems whose q is fp8: that of the values which the arrays stand for, computed in fp32. Copies
// of q, k, v, o, do and the gradients (4 bytes an element) lie in the workspace beside what the
// fp32 problem needs itself.
int64_t fp8_workspace_bytes(const Problem& problem, int num_threads);
Status run_fp8(const Problem& problem, const Buffers& buffers);

}  // namespace tessera::cpu
