// SPDX-License-Identifier: Apache-2.0
// with_outputs(problem): dtypes and shapes by the tables that validate() compares with.
#include <algorithm>

#include "core/problem/problem.h"
#include "core/validate/shapes.h"
#include "core/validate/validate.h"

namespace tessera {
namespace {

// What the pass writes, and in the backward pass what its caller has from the forward pass or makes
// in the shape of that.
bool is_described(const Problem& p, int index) {
  if (is_output(p, index)) return true;
  return is_backward(p) && (index == TESSERA_O || index == TESSERA_LSE || index == TESSERA_DO ||
                            index == TESSERA_DLSE);
}

Status check_wanted(const Problem& p, std::span<const int32_t> wanted) {
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (wanted[i] < 0 || wanted[i] >= TESSERA_NUM_TENSORS) {
      return invalid("wanted[%zu]=%d: must be a tessera_index below %d", i, wanted[i],
                     int{TESSERA_NUM_TENSORS});
    }
    if (!is_described(p, wanted[i])) {
      return invalid("wanted[%zu]=%d: %s is no output of the %s pass; describe it as its array is",
                     i, wanted[i], tensor_rule(wanted[i]).name,
                     is_backward(p) ? "backward" : "forward");
    }
  }
  return {};
}

// Contiguous in the caller's order of axes. Strides that overflow saturate, for validate() to say.
void make_contiguous(const Problem& p, int index, Tensor& t) {
  const AxisOrder order = caller_order(p, index);
  int64_t step = 1;
  for (int i = order.count - 1; i >= 0; --i) {
    const int axis = order.axis[i];
    t.stride[axis] = step;
    if (__builtin_mul_overflow(step, std::max<int64_t>(t.extent[axis], 1), &step)) step = INT64_MAX;
  }
}

Status describe(Problem& p, const Sizes& s, int index, int32_t dtype) {
  if (const int source = tensor_like(index); !given(p, source) && source != index) {
    return invalid("%s: is wanted in the shape of %s, which is not given; give it, or ask for less",
                   name_of(p, index), name_of(p, source));
  }
  Tensor& t = p.tensor[index];
  t.dtype = dtype != TESSERA_NONE ? dtype : usual_dtype(p, index);
  const Shape shape = expected_shape(p, s, index);
  for (int axis = 0; axis < tensor_rule(index).rank; ++axis) {
    t.extent[axis] = shape.axis[axis].extent;
  }
  make_contiguous(p, index, t);
  return {};
}

}  // namespace

Result<Problem> with_outputs(const Problem& problem, std::span<const int32_t> wanted) {
  TESSERA_RETURN_IF_ERROR(validate_fields(problem));
  TESSERA_RETURN_IF_ERROR(check_wanted(problem, wanted));
  Problem p = problem;
  // What is not described yet may hold anything.
  bool is_wanted[TESSERA_NUM_TENSORS] = {};
  for (const int32_t index : wanted) is_wanted[index] = true;
  for (int i = 0; i < TESSERA_NUM_TENSORS; ++i) {
    if (is_wanted[i] || !given(p, i)) p.tensor[i] = Tensor{};
  }
  TESSERA_RETURN_IF_ERROR(validate_sizes(p));
  const Sizes s = sizes_of(p);
  // o comes before what is like it, in the order of tessera_index.
  for (int i = 0; i < TESSERA_NUM_TENSORS; ++i) {
    if (is_wanted[i]) TESSERA_RETURN_IF_ERROR(describe(p, s, i, problem.tensor[i].dtype));
  }
  TESSERA_RETURN_IF_ERROR(validate(p));
  return p;
}

}  // namespace tessera
