// SPDX-License-Identifier: Apache-2.0
// The online softmax of a fragment's rows.
#pragma once

#include "cuda/common/score/score.cuh"

namespace tessera::cuda::sm80 {

// Running softmax of the two rows (8 apart) that a thread shares with three others.
struct SoftmaxRows {
  // In the units of the scores. Where a row has seen nothing, its sum is 0 and its maximum -inf or
  // very low (kLowest).
  float max[2] = {-kInfinity, -kInfinity};
  float sum[2] = {0, 0};  // of this thread's columns

  // s becomes 2^(scale (s - max)); returns in `rescale` what earlier sums and O are worth now.
  // kFused: one instruction a score, and the rounding of scale max. kHidesLow: a row whose scores
  // are very low has seen nothing; `scale` is a constant then.
  template <int kN, bool kFused, bool kHidesLow>
  __device__ void update(float (&s)[kN / 2], float scale, float (&rescale)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float row_max = max[half];
#pragma unroll
      for (int i = 0; i < kN / 4; ++i) row_max = fmaxf(row_max, s[4 * (i / 2) + 2 * half + i % 2]);
      row_max = fmaxf(row_max, __shfl_xor_sync(~0u, row_max, 1));
      row_max = fmaxf(row_max, __shfl_xor_sync(~0u, row_max, 2));
      // A row that has seen nothing: 0 is so far above that its exponentials are 0.
      const bool blind = kHidesLow ? row_max <= kLowest2 / scale : row_max == -kInfinity;
      const float top = blind ? 0 : row_max, offset = top * scale;
      rescale[half] = exp2_approx((max[half] - top) * scale);
      max[half] = row_max;
      float row_sum = 0;
#pragma unroll
      for (int i = 0; i < kN / 4; ++i) {
        float& value = s[4 * (i / 2) + 2 * half + i % 2];
        value = exp2_approx(kFused ? value * scale - offset : (value - top) * scale);
        row_sum += value;
      }
      sum[half] = sum[half] * rescale[half] + row_sum;
    }
  }

  __device__ float total(int half) const {
    float row_sum = sum[half];
    row_sum += __shfl_xor_sync(~0u, row_sum, 1);
    return row_sum + __shfl_xor_sync(~0u, row_sum, 2);
  }
};

}  // namespace tessera::cuda::sm80
