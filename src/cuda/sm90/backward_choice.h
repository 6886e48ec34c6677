// SPDX-License-Identifier: Apache-2.0
// Which of the built backward kernels a problem runs in. No GPU is asked.
#pragma once

#include <cstdint>

#include "core/problem.h"
#include "cuda/sm90/backward_kernels.h"
#include "cuda/sm90/backward_two_plan.h"

namespace tessera::cuda::sm90 {

// The first row of the table that holds the head dims and knows the features (of BackwardFeature);
// null: none.
const BackwardKernel* find_backward_kernel(int dtype, int64_t dqk, int64_t dv, int features);

// The bias comes by copies of 16 bytes, if its address allows it. Others need the kernel of all
// features. One row for all queries does too: asking the L2 for it again and again takes twice as
// long.
bool copies_bias(const Problem& problem);

// dbias can be summed by the kernel of dq, dk and dv: few sequences share an element, nothing but
// the band and the bias shapes a score, and that after the scale, so that dS is its gradient.
bool sums_bias(const Problem& problem);

// Of a problem for which require_backward() (plan.h) has nothing to say.
const BackwardKernel& choose_backward_kernel(const Problem& problem);

// The two kernels of backward_two.h, where they are the faster way on so many multiprocessors and
// can do it; null: choose_backward_kernel().
const TwoKernels* choose_two_kernels(const Problem& problem, int multiprocessors);

}  // namespace tessera::cuda::sm90
