// SPDX-License-Identifier: Apache-2.0
// Rows of o, lse and max_logit: how a finished row reaches memory.
#pragma once

#include "cuda/common/element.cuh"
#include "cuda/sm90/ptx.cuh"
#include "cuda/sm90/schedule.cuh"

namespace tessera::cuda::sm90 {

// Raw scores to exponents of 2. A scale of 0 becomes the smallest normal number: the same scores,
// and -inf stays -inf.
__device__ __forceinline__ float log2_scale(const Params& p) {
  return fmaxf(p.softmax_scale * kLog2e, 1.17549435e-38f);
}

template <typename Element>
struct Output {
  const Params& p;
  const Work& work;

  __device__ __forceinline__ Element* row_of_o(int row) const {
    const View& o = p.tensor[TESSERA_O];
    return static_cast<Element*>(o.data) +
           offset_of(o, work.q.batch, work.q.first + row, work.head);
  }

  __device__ __forceinline__ void store_lse(int row, float value) const {
    const View& lse = p.tensor[TESSERA_LSE];
    if (!lse.data) return;
    static_cast<float*>(lse.data)[offset_of(lse, work.q.batch, work.head, work.q.first + row)] =
        value;
  }

  // From m (log2 units) and l of a row, and the head's sink: what o is multiplied by, and the lse
  // in place of l. A row that sees nothing, not even a sink, has o = 0 and lse = -inf.
  __device__ __forceinline__ float finish_row(int row, float m, float& l) const {
    float factor = 1;
    const View& sinks = p.tensor[TESSERA_SINK];
    if (work.exists(row) && (sinks.data || (p.flags & TESSERA_SINK_OFF_BY_ONE))) {
      const float sink =
          sinks.data ? load_float(sinks.data, offset_of(sinks, work.head), sinks.dtype) * kLog2e
                     : 0;
      const float largest = fmaxf(m, sink);
      factor = exp2_approx(m - largest);
      l = l * factor + exp2_approx(sink - largest);
      m = largest;
    }
    const float inverse = l == 0.f ? 0.f : factor / l;
    l = l == 0.f ? -kInfinity : (m + log2f(l)) * kLn2;
    return inverse * p.dropout_scale;
  }

  // Rows [first, first + rows) of a tile that sees no key, by one warp: zeros and the sink's lse;
  // also the rows that belong to no sequence but lie in the tensor.
  __device__ __forceinline__ void store_nothing(int first, int rows, int lane) const {
    constexpr int kColumns = 16 / sizeof(Element);  // of one store
    for (int row = first; row < first + rows; ++row) {
      if (!work.owns(row)) continue;
      if (lane == 0) {
        float lse = 0;
        finish_row(row, -kInfinity, lse);
        store_lse(row, lse);
      }
      Element* o = row_of_o(row);
      for (int column = kColumns * lane; column < p.dv; column += kColumns * kWarp) {
        *reinterpret_cast<uint4*>(o + column) = uint4{0, 0, 0, 0};
      }
    }
  }

  // The largest of all rows. Floats compare as integers, in reverse order when negative; the array
  // was filled with -inf.
  __device__ __forceinline__ void raise_max_logit(float value) const {
    const View& view = p.tensor[TESSERA_MAX_LOGIT];
    float* at = static_cast<float*>(view.data) + offset_of(view, work.head);
    if (__float_as_int(value) >= 0) {
      atomicMax(reinterpret_cast<int*>(at), __float_as_int(value));
    } else {
      atomicMin(reinterpret_cast<unsigned*>(at), __float_as_uint(value));
    }
  }
};

}  // namespace tessera::cuda::sm90
