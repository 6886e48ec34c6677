// SPDX-License-Identifier: Apache-2.0
// What becomes of a row of the forward pass: its factor, its lse, its largest logit.
#pragma once

#include <cfloat>

#include "cuda/common/element.cuh"

namespace tessera::cuda {

__device__ inline bool has_sink(const Params& p) {
  return p.tensor[TESSERA_SINK].data || (p.flags & TESSERA_SINK_OFF_BY_ONE);
}
__device__ inline float sink_of(const Params& p, int head) {
  const View& sink = p.tensor[TESSERA_SINK];
  return sink.data ? load_float(sink.data, head * sink.stride[0], sink.dtype) : 0.f;
}

struct RowResult {
  float factor;  // of its O
  float lse;
};

// A row's results from its running maximum, in units of log2, and the sum of 2^(x - max). The sink
// joins where it is due: in one of the splits, and in rows that exist.
__device__ inline RowResult finish_row(const Params& p, int head, float max, float sum,
                                       bool with_sink) {
  float factor = p.dropout_scale, sink = -kInfinity;
  if (max == -kInfinity) max = 0;
  if (with_sink && has_sink(p)) {
    sink = sink_of(p, head);
    const float sink2 = fminf(sink * kLog2e, FLT_MAX);  // 3e38 is infinite in these units
    const float top = fmaxf(sum == 0 ? -FLT_MAX : max, sink2);
    const float rescale = sum == 0 ? 0 : exp2_approx(max - top);
    sum = sum * rescale + exp2_approx(sink2 - top);
    factor *= rescale;
    max = top;
  }
  if (sum == 0) return {0, sink};
  const float lse = max * kLn2 + logf(sum);
  return {factor / sum, lse < sink ? sink : lse};  // NaN stays NaN
}

// What an fp8 v of this sequence and head was divided by; 1 without.
__device__ inline float v_scale_of(const Params& p, int n, int head) {
  const View& scales = p.tensor[TESSERA_V_SCALE];
  return scales.data ? load_float(scales.data, offset_of(scales, n, head / p.group), TESSERA_FP32)
                     : 1.f;
}

// *address = max(*address, value), not for NaN. Compares by sign bit, so that -0 is above every
// other negative number.
__device__ inline void atomic_max(float* address, float value) {
  if (__float_as_int(value) >= 0) {
    atomicMax(reinterpret_cast<int*>(address), __float_as_int(value));
  } else {
    atomicMin(reinterpret_cast<unsigned*>(address), __float_as_uint(value));
  }
}

}  // namespace tessera::cuda
