// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm80/convert/problem.h"

#include "core/problem/scales.h"
#include "cuda/common/rules/arguments.h"

namespace tessera::cuda::sm80 {

bool has_copy(const Problem& problem, int index) {
  if (!is_converted(problem) || !given(problem, index)) return false;
  const int amax = amax_of(index);
  const bool asked = amax != TESSERA_NUM_TENSORS && given(problem, amax);
  return asked || problem.tensor[index].dtype != TESSERA_FP32;
}

Problem problem_of_kernels(const Problem& problem) {
  if (!is_converted(problem)) return problem;
  Problem inner = problem_of_values(problem);
  for (const int index : kScaledTensors) {
    if (!given(problem, index)) continue;
    Tensor& t = inner.tensor[index];
    t = has_copy(problem, index) ? dense_like(t, TESSERA_FP32) : problem.tensor[index];
  }
  return inner;
}

}  // namespace tessera::cuda::sm80
