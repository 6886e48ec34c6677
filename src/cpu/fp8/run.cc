// SPDX-License-Identifier: Apache-2.0
#include "cpu/fp8/run.h"

#include "core/problem/scales.h"
#include "core/workspace.h"
#include "cpu/backward/run.h"
#include "cpu/forward/run.h"
#include "cpu/fp8/rows.h"

namespace tessera::cpu {
namespace {

// Tensors that are fp32 in the problem inside.
constexpr int kRows[] = {TESSERA_Q,  TESSERA_K,  TESSERA_V,  TESSERA_O,
                         TESSERA_DO, TESSERA_DQ, TESSERA_DK, TESSERA_DV};

void make_contiguous(Tensor& t) {
  t.dtype = TESSERA_FP32;
  int64_t stride = 1;
  for (int axis = 3; axis >= 0; --axis) {
    t.stride[axis] = t.extent[axis] <= 1 ? 0 : stride;
    stride *= t.extent[axis];
  }
}

// The fp32 problem, and where its tensors and its own workspace lie.
struct Widened {
  Problem problem;
  float* data[TESSERA_NUM_TENSORS] = {};
  char* workspace = nullptr;
  int64_t workspace_bytes = 0;
  int64_t bytes = 0;

  Widened(const Problem& given_problem, int num_threads, void* base) : problem(given_problem) {
    Workspace all(base);
    for (const int index : kRows) {
      if (!given(problem, index)) continue;
      Tensor& t = problem.tensor[index];
      make_contiguous(t);
      data[index] = all.take<float>(element_count(t, 4), 64);
    }
    for (const int index : kRows) {
      problem.tensor[scale_of(index)] = Tensor{};
      if (const int amax = amax_of(index); amax != TESSERA_NUM_TENSORS) {
        problem.tensor[amax] = Tensor{};
      }
    }
    problem.q_scale_block = problem.k_scale_block = 0;
    problem.flags &= ~uint32_t{TESSERA_V_IN_K};  // v has a copy of its own
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
  for (const int index : kRows) {
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
  for (const int index : kRows) {
    if (!given(problem, index) || !is_output(problem, index)) continue;
    narrow_rows(problem, buffers, index, inner.data[index]);
  }
  return {};
}

}  // namespace tessera::cpu
