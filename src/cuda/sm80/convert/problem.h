// SPDX-License-Identifier: Apache-2.0
// Problems whose q is fp8 run as the fp32 problem of the values that the arrays stand for, between
// copies in the workspace: no scale, of whatever kind, reaches an attention kernel.
#pragma once

#include "core/problem/dtype.h"
#include "core/problem/problem.h"

namespace tessera::cuda::sm80 {

inline bool is_converted(const Problem& problem) { return is_fp8(problem.tensor[TESSERA_Q].dtype); }

// True if the tensor, one of kScaledTensors, has a copy in fp32: all but those in fp32 whose
// largest value nobody asks for.
bool has_copy(const Problem& problem, int index);

// What the kernels run: the problem itself, or that in fp32, whose copies have aligned rows.
Problem problem_of_kernels(const Problem& problem);

}  // namespace tessera::cuda::sm80
