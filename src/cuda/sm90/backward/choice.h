// SPDX-License-Identifier: Apache-2.0
// Which of the backward kernels a problem runs in. No GPU is asked; no CUDA header.
#pragma once

#include <cstdint>

#include "core/choose/support.h"
#include "core/problem/problem.h"
#include "cuda/sm90/backward/apart/kernels.h"
#include "cuda/sm90/backward/kernels.h"

namespace tessera::cuda::sm90 {

// What is asked of a kernel.
struct BackwardNeeds {
  uint32_t features;  // of Feature
  bool deterministic, sums_dbias = false;
  bool fp8 = false;  // products of E4M3: other rows have none
};

// The first row of the table that holds the head dims and knows these; null: none.
const BackwardKernel* find_backward_kernel(int dtype, int64_t dqk, int64_t dv,
                                           const BackwardNeeds& needs);

// The bias comes by copies of 16 bytes, if its address allows it. Others need the kernel of all
// features. One row for all queries does too: asking the L2 for it again and again takes twice as
// long.
bool copies_bias(const Problem& problem);

// dbias can be summed by the kernel of dq, dk and dv: few sequences share an element, nothing but
// the band and the bias shapes a score, and that after the scale, so that dS is its gradient.
bool sums_bias(const Problem& problem);

// What the backward pass asks beyond dtypes, strides and sizes.
void require_backward(Support& support, const Problem& problem);

// True if the backward pass of 16-bit tensors can make S and dP of E4M3 (backward/fused/rounded.cuh),
// of a problem of which Hopper's other rules have nothing to say.
bool has_rounded_backward(const Problem& problem);

// The kernel that does, for such a problem.
const BackwardKernel& rounded_backward_kernel(const Problem& problem);

// The kernel of a problem for which require_backward() has nothing to say.
const BackwardKernel& choose_backward_kernel(const Problem& problem);

// The two kernels of backward/apart/kernels.h, where they are the faster way on so many
// multiprocessors and can do it; null: choose_backward_kernel().
const ApartKernels* choose_apart_kernels(const Problem& problem, int multiprocessors);

}  // namespace tessera::cuda::sm90
