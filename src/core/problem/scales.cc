// SPDX-License-Identifier: Apache-2.0
#include "core/problem/scales.h"

#include <algorithm>

#include "core/count.h"

namespace tessera {

double scale_at(const Problem& p, const Buffers& b, int index, int64_t n, int64_t h, int64_t i) {
  if (index == TESSERA_NUM_TENSORS || !given(p, index)) return 1;
  const Tensor& t = p.tensor[index];
  int64_t at = 0;
  if (tensor_rule(index).rank == 3) {
    const bool keys = index == TESSERA_K_SCALE || index == TESSERA_V_SCALE;
    const int32_t block = keys ? p.k_scale_block : p.q_scale_block;
    at = offset_of(t, broadcast(t, 0, n), broadcast(t, 1, h),
                   block > 0 ? broadcast(t, 2, i / block) : 0);
  }
  return static_cast<const float*>(b.data[index])[at];
}

int scale_of(int index) {
  switch (index) {
    case TESSERA_Q:
      return TESSERA_Q_SCALE;
    case TESSERA_K:
      return TESSERA_K_SCALE;
    case TESSERA_V:
      return TESSERA_V_SCALE;
    case TESSERA_O:
      return TESSERA_O_SCALE;
    case TESSERA_DO:
      return TESSERA_DO_SCALE;
    case TESSERA_DQ:
      return TESSERA_DQ_SCALE;
    case TESSERA_DK:
      return TESSERA_DK_SCALE;
    case TESSERA_DV:
      return TESSERA_DV_SCALE;
  }
  return TESSERA_NUM_TENSORS;
}

int amax_of(int index) {
  switch (index) {
    case TESSERA_O:
      return TESSERA_AMAX_O;
    case TESSERA_DQ:
      return TESSERA_AMAX_DQ;
    case TESSERA_DK:
      return TESSERA_AMAX_DK;
    case TESSERA_DV:
      return TESSERA_AMAX_DV;
  }
  return TESSERA_NUM_TENSORS;
}

Problem problem_of_values(const Problem& problem) {
  Problem values = problem;
  for (const int index : kScaledTensors) {
    for (const int beside : {scale_of(index), amax_of(index)}) {
      if (beside != TESSERA_NUM_TENSORS) values.tensor[beside] = Tensor{};
    }
    if (!given(problem, index)) continue;
    Tensor& t = values.tensor[index];
    t.dtype = TESSERA_FP32;
    Count stride = 1;
    for (int axis = 3; axis >= 0; --axis) {
      t.stride[axis] = t.extent[axis] <= 1 ? 0 : stride.value();
      stride *= t.extent[axis];
    }
  }
  values.q_scale_block = values.k_scale_block = 0;
  values.flags &= ~uint32_t{TESSERA_V_IN_K};  // v has a copy of its own
  return values;
}

void store_scaled(void* base, int64_t index, int32_t dtype, double value, double scale) {
  value /= scale;
  if (is_fp8(dtype)) {
    const double most = largest_finite(dtype);
    value = std::clamp(value, -most, most);  // NaN is not less than either
  }
  store_element(base, index, dtype, value);
}

}  // namespace tessera
