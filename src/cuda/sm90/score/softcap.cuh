// SPDX-License-Identifier: Apache-2.0
// softcap * tanh(s * softmax_scale / softcap), in two forms: by exponentials, and by the polynomial
// of common/score/softcap.cuh, which says why.
#pragma once

#include "cuda/common/element.cuh"
#include "cuda/common/score/softcap.cuh"

namespace tessera::cuda::sm90 {

// s (c0 + c1 s^2 + c2 s^4): TanhPolynomial with the scale and the cap in its coefficients. It is as
// good as a capped score while |y| <= kSmall, y = s * softmax_scale / softcap.
struct CapPolynomial {
  static constexpr float kSmall = TanhPolynomial::kSmall;
  float c0, c1, c2;

  // inner: softmax_scale / softcap; outer: softcap.
  __device__ __forceinline__ CapPolynomial(float inner, float outer)
      : c0(TanhPolynomial::kC0 * inner * outer),
        c1(c0 * (inner * inner) * TanhPolynomial::kC1),
        c2(c0 * (inner * inner) * (inner * inner) * TanhPolynomial::kC2) {}
  __device__ __forceinline__ float operator()(float s, float less = 0) const {
    const float s2 = s * s;
    return fmaf(s, fmaf(s2, fmaf(s2, c2, c1), c0), -less);
  }
};

// Any score but a hidden one.
__device__ __forceinline__ float cap_exactly(float s, float inner, float outer) {
  const float e = exp2_approx(s * (2 * kLog2e * inner));
  return fmaf(-2 * outer, reciprocal_approx(1 + e), outer);
}

// The softcap of a kernel in which nothing comes after it: the polynomial's last product is one
// with the subtraction in an exponent. Each block is tried with it; one that has a score that is
// not small is done again, with exactly capped scores. Logits are in units of log2.
class LateSoftcap {
 public:
  __device__ __forceinline__ explicit LateSoftcap(const Params& p)
      : inner_(p.softmax_scale / p.softcap),
        outer_(p.softcap * kLog2e),
        small_(inner_, outer_),
        chosen_(small_) {}

  // Maxima of the block's rows to logits. Unless those of the rows that `vote` are small in all
  // threads of the warp, scores become logits too, which exponent() leaves as they are.
  template <int kScores>
  __device__ __forceinline__ void cap_maxima(const bool (&vote)[2], float (&row)[2],
                                             float (&S)[kScores]) {
    const float raw[2] = {row[0], row[1]};
    row[0] = row[0] == -kInfinity ? row[0] : small_(row[0]);
    row[1] = row[1] == -kInfinity ? row[1] : small_(row[1]);
    const bool small = (!vote[0] || is_small(raw[0])) && (!vote[1] || is_small(raw[1]));
    if (__all_sync(kAllLanes, small)) return;
    constexpr float kHidden = -1e18f;  // its square is finite
#pragma unroll
    for (float& s : S) s = s == -kInfinity ? kHidden : cap_exactly(s, inner_, outer_);
    row[0] = raw[0] == -kInfinity ? raw[0] : cap_exactly(raw[0], inner_, outer_);
    row[1] = raw[1] == -kInfinity ? raw[1] : cap_exactly(raw[1], inner_, outer_);
    chosen_.c0 = 1, chosen_.c1 = chosen_.c2 = 0;
  }
  __device__ __forceinline__ void end_block() { chosen_ = small_; }

  // Weights relative to `reference` add up to no more than this while all their scores are small.
  __device__ __forceinline__ float most(float reference) const {
    const float largest = small_(CapPolynomial::kSmall / inner_);
    return is_polynomial() ? exp2_approx(largest - reference) : -1.f;
  }
  __device__ __forceinline__ float exponent(float s, float reference) const {
    return chosen_(s, reference);
  }

 private:
  // The polynomial goes on falling below -kSmall. The scores there weigh, under a cap of 15 or
  // more, so little beside a largest one that is above -kSmall that their error is at most 2e-4 of
  // the sum. Hidden scores are -inf, which a c2 of 0 would make NaN.
  __device__ __forceinline__ bool is_polynomial() const {
    constexpr float kLeastCap = 15;
    return outer_ >= kLeastCap * kLog2e && small_.c2 > 1e-30f;
  }
  __device__ __forceinline__ bool is_small(float largest) const {
    return is_polynomial() &&
           (largest == -kInfinity || fabsf(largest * inner_) <= CapPolynomial::kSmall);
  }

  float inner_, outer_;
  CapPolynomial small_, chosen_;  // chosen: that, or s itself
};

}  // namespace tessera::cuda::sm90
