// SPDX-License-Identifier: Apache-2.0
// The online softmax of a fragment's rows.
#pragma once

#include "cuda/common/score/score.cuh"

namespace tessera::cuda::sm80 {

// Running softmax of the two rows (8 apart) that a thread shares with three others.
struct SoftmaxRows {
  float max[2] = {-kInfinity, -kInfinity};  // in the units of the scores
  float sum[2] = {0, 0};                    // of this thread's columns

  // s becomes 2^(scale (s - max)); returns in `rescale` what earlier sums and O are worth now.
  // kFused: one instruction a score, and the rounding of scale max.
  template <int kN, bool kFused>
  __device__ void update(float (&s)[kN / 2], float scale, float (&rescale)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float row_max = max[half];
#pragma unroll
      for (int i = 0; i < kN / 4; ++i) row_max = fmaxf(row_max, s[4 * (i / 2) + 2 * half + i % 2]);
      row_max = fmaxf(row_max, __shfl_xor_sync(~0u, row_max, 1));
      row_max = fmaxf(row_max, __shfl_xor_sync(~0u, row_max, 2));
      const float top = row_max == -kInfinity ? 0 : row_max, offset = top * scale;
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
