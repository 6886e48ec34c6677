// SPDX-License-Identifier: Apache-2.0
// softcap * tanh(s * softmax_scale / softcap) of a fragment, in units of log2.
//
// The exponential unit is the busiest after the tensor cores, and tanh by exponentials asks it for
// two more results a score. Scores are small beside the cap in most problems; there an odd
// polynomial of three terms does, off by 5e-7 of the cap.
#pragma once

#include "cuda/common/element.cuh"

namespace tessera::cuda {

// tanh(y) = kC0 y (1 + kC1 y^2 + kC2 y^4) for |y| <= kSmall, where these coefficients have the
// least largest error. It rises everywhere.
struct TanhPolynomial {
  static constexpr float kSmall = 0.35f;
  static constexpr float kC0 = 0.99999020f, kC1 = -0.33268732f, kC2 = 0.12248110f;
};

class Softcap {
 public:
  __device__ __forceinline__ explicit Softcap(const Params& p)
      : inner_(p.softmax_scale / p.softcap), outer_(p.softcap * kLog2e) {}

  // A warp's raw scores to logits. gradient, where given, is multiplied by what a logit changes by
  // when s softmax_scale does. Called by all lanes of a warp.
  template <int kCount, typename... Gradient>
  __device__ __forceinline__ void apply(float (&s)[kCount], Gradient&... gradient) const {
    float largest = 0;
#pragma unroll
    for (int e = 0; e < kCount; ++e) largest = fmaxf(largest, fabsf(s[e]));
    if (__all_sync(~0u, largest * inner_ <= TanhPolynomial::kSmall)) {
#pragma unroll
      for (int e = 0; e < kCount; ++e) s[e] = small(s[e] * inner_, gradient[e]...) * outer_;
    } else {
#pragma unroll
      for (int e = 0; e < kCount; ++e) s[e] = any(s[e] * inner_, gradient[e]...) * outer_;
    }
  }

 private:
  static constexpr float kC0 = TanhPolynomial::kC0, kC1 = TanhPolynomial::kC1 * kC0,
                         kC2 = TanhPolynomial::kC2 * kC0;

  __device__ __forceinline__ static float small(float y) {
    const float y2 = y * y;
    return y * fmaf(y2, fmaf(y2, kC2, kC1), kC0);
  }
  __device__ __forceinline__ static float small(float y, float& gradient) {
    const float t = small(y);
    gradient *= fmaf(-t, t, 1.f);
    return t;
  }
  __device__ __forceinline__ static float any(float y) {
    return fmaf(-2, reciprocal_approx(1 + exp2_approx(y * (2 * kLog2e))), 1.f);
  }
  // 1 - tanh(y)^2 right to its last digits where tanh is all but 1.
  __device__ __forceinline__ static float any(float y, float& gradient) {
    const float e = exp2_approx(fabsf(y) * (-2 * kLog2e)), r = reciprocal_approx(1 + e);
    gradient *= 4 * e * r * r;
    return copysignf((1 - e) * r, y);
  }

  float inner_, outer_;
};

}  // namespace tessera::cuda
