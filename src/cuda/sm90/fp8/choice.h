// SPDX-License-Identifier: Apache-2.0
// Which problems run in the fp8 kernels, and in which row of fp8/table.def. No CUDA header.
#pragma once

#include "core/choose/support.h"
#include "core/problem/problem.h"
#include "cuda/common/rules/arguments.h"
#include "cuda/sm90/fp8/kernels.h"

namespace tessera::cuda::sm90 {

// True of problems of fp8 q.
bool is_of_fp8(const Problem& problem);
// True of these and of those that is_rounded(): these kernels or none run it forward.
inline bool multiplies_fp8(const Problem& problem) {
  return is_of_fp8(problem) || is_rounded(problem);
}

struct Fp8Needs {
  int dtype_of_o;
  bool exact_sum, by_blocks;
};

// The row with the least head dims of those that hold these, and the tallest tiles of those with at
// most so many consumers; null where there is none.
const Fp8Kernel* find_fp8_kernel(const Fp8Needs& needs, int64_t dqk, int64_t dv,
                                 int most_consumers = 3);

// The row that a problem which require_fp8() lets pass runs in.
const Fp8Kernel& fp8_kernel_of(const Problem& problem, int multiprocessors);

// The rules that the fp8 kernels have beside those of all kernels of Hopper.
void require_fp8(Support& support, const Problem& problem);

}  // namespace tessera::cuda::sm90
