// SPDX-License-Identifier: Apache-2.0
#include "cpu/fp8/run.h"

#include "core/problem/scales.h"
#include "core/workspace.h"
#include "cpu/backward/run.h"
#include "cpu/forward/run.h"
#include "cpu/fp8/rows.h"

namespace tessera::cpu {
namespace {

// The fp32 problem, and where its tensors and its own workspace lie.
struct Widened {
  Problem problem;
  float* data[TESSERA_NUM_TENSORS] = {};
  char* workspace = nullptr;
  int64_t workspace_bytes = 0;
  int64_t bytes = 0;

  Widened(const Problem& given_problem, int num_threads, void* base)
      : problem(problem_of_values(given_problem)) {
    Workspace all(base);
    for (const int index : kScaledTensors) {
      if (!given(problem, index)) continue;
      data[index] = all.take<float>(element_count(problem.tensor[index], 4), 64);
    }
    workspace_bytes = is_backward(problem) ? backward_workspace_bytes(problem, num_threads)
                                           : forward_workspace_bytes(problem, num_threads);
    workspace = all.take<char>(workspace_bytes, 64);
    bytes = all.bytes();
  }
};

}  // namespace

int64_t fp8_workspace_bytes(const Problem& problem, int num_threads) {
  return Widened(problem, num_threads, nullptr).bytes;
}

Status run_fp8(const Problem& problem, const Buffers& buffers) {
  const Widened inner(problem, buffers.num_threads, buffers.workspace);
  Buffers inside = buffers;
  inside.workspace = inner.workspace;
  inside.workspace_bytes = inner.workspace_bytes;
  for (const int index : kScaledTensors) {
    if (!given(problem, index)) continue;
    inside.data[index] = inner.data[index];
    if (!is_output(problem, index)) {
      widen_rows(problem, buffers, index, inner.data[index]);
    }
  }
  if (is_backward(problem)) {
    run_backward(inner.problem, inside);
  } else {
    TESSERA_RETURN_IF_ERROR(run_forward(inner.problem, inside));
  }
  for (const int index : kScaledTensors) {
    if (!given(problem, index) || !is_output(problem, index)) continue;
    narrow_rows(problem, buffers, index, inner.data[index], problem.tensor[index].extent[3]);
  }
  return {};
}

}  // namespace tessera::cpu
