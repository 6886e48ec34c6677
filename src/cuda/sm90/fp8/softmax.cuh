// SPDX-License-Identifier: Apache-2.0
// The softmax of the fp8 forward kernels (fp8/kernel.cuh), as far as it is arithmetic over what a
// thread holds: two rows, r = 0 and 1, of S and P, in groups of 8 keys as in forward/softmax.cuh.
//
// P is E4M3: 256 exp2(c S - c m), m the row's largest score so far, which makes the top key exact
// and uses the whole range below. `reference` is c m - 8, so P = exp2(c S - reference).
#pragma once

#include "cuda/common/element.cuh"
#include "cuda/sm90/machine/ptx.cuh"

namespace tessera::cuda::sm90 {

constexpr float kTop = 256, kLog2OfTop = 8;  // the P of a row's largest score
constexpr float kSeenNothing = -0x1p126f;    // a reference; finite, so that differences are no NaN

// NaN if one of them is.
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
// a b + c, brought into [0, 1]; NaN becomes 0.
__device__ __forceinline__ float fma_saturated(float a, float b, float c) {
  float y;
  asm("fma.rn.ftz.sat.f32 %0, %1, %2, %3;" : "=f"(y) : "f"(a), "f"(b), "f"(c));
  return y;
}
// Four values of [0, 448] as bytes, the first one lowest.
__device__ __forceinline__ uint32_t pack_e4m3(float a, float b, float c, float d) {
  uint32_t bytes;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n"
      "}"
      : "=r"(bytes)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return bytes;
}

__device__ __forceinline__ float quad_max(float x) {
  x = max_or_nan(x, __shfl_xor_sync(kAllLanes, x, 2));
  return max_or_nan(x, __shfl_xor_sync(kAllLanes, x, 1));
}
__device__ __forceinline__ int quad_max(int x) {
  x = max(x, __shfl_xor_sync(kAllLanes, x, 2));
  return max(x, __shfl_xor_sync(kAllLanes, x, 1));
}

// The largest score of each row, NaN where one is NaN. Called by all lanes of a warp.
template <int kScores>
__device__ __forceinline__ void largest_scores(const float (&S)[kScores], float (&largest)[2]) {
  float a[2] = {S[0], S[2]}, b[2] = {S[1], S[3]};
#pragma unroll
  for (int g = 1; g < kScores / 4; ++g) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      a[r] = max_or_nan(a[r], S[4 * g + 2 * r]);
      b[r] = max_or_nan(b[r], S[4 * g + 2 * r + 1]);
    }
  }
  largest[0] = quad_max(max_or_nan(a[0], b[0]));
  largest[1] = quad_max(max_or_nan(a[1], b[1]));
}

// The same where no score is masked. Integers order the floats that are not negative, those of NaN
// above all, and put every negative one below: a maximum of three is one instruction. A row of
// negative scores alone is done again.
template <int kScores>
__device__ __forceinline__ void largest_scores_by_integers(const float (&S)[kScores],
                                                           float (&largest)[2]) {
  static_assert(kScores % 16 == 0);
  const auto bits = [&](int e) { return __float_as_int(S[e]); };
  int most[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    int a = max(bits(2 * r), bits(2 * r + 1)), b = max(bits(2 * r + 4), bits(2 * r + 5));
#pragma unroll
    for (int g = 2; g < kScores / 4; g += 2) {
      a = __vimax3_s32(a, bits(4 * g + 2 * r), bits(4 * g + 2 * r + 1));
      b = __vimax3_s32(b, bits(4 * g + 2 * r + 4), bits(4 * g + 2 * r + 5));
    }
    most[r] = max(a, b);
  }
  most[0] = quad_max(most[0]), most[1] = quad_max(most[1]);
  largest[0] = __int_as_float(most[0]), largest[1] = __int_as_float(most[1]);
  if (__any_sync(kAllLanes, (most[0] | most[1]) < 0)) largest_scores(S, largest);
}

// P's bytes by the FMA pipe alone. An E4M3 byte is nearly linear in the logarithm of what it stands
// for: byte = 8 log2 P + 56, with the mantissa's line in place of its curve. So with
// t = byte / 128 = S c / 16 + offset, saturated, t + 384 has the byte in bits 8 to 14. kRound makes
// the mean error of cutting 0; the largest score of a row stays exact. Its rms error is 0.0314
// where rounding's is 0.0265.
struct LinearWeights {
  static constexpr float kRound = 0.043f;
  static constexpr float kUnit = 16;  // of c and of references, in exponents of 2
  const float (&c)[2];
  float offset[2];

  __device__ __forceinline__ LinearWeights(const float (&c)[2], const float (&reference)[2])
      : c(c), offset{(56 + kRound) / 128 - reference[0], (56 + kRound) / 128 - reference[1]} {}
  __device__ __forceinline__ float weight(float s, int r) const {
    return __fadd_rn(fma_saturated(s, c[r], offset[r]), 384.f);
  }
  static __device__ __forceinline__ uint32_t pack(float a, float b, float c, float d) {
    const uint32_t low = __byte_perm(__float_as_uint(a), __float_as_uint(b), 0x51);
    const uint32_t high = __byte_perm(__float_as_uint(c), __float_as_uint(d), 0x51);
    return __byte_perm(low, high, 0x5410);
  }
};

// P by exponentials, rounded to nearest.
struct ExactWeights {
  static constexpr float kUnit = 1;
  const float (&c)[2];
  const float (&reference)[2];

  __device__ __forceinline__ float weight(float s, int r) const {
    return exp2_approx(fmaf(s, c[r], -reference[r]));
  }
  static __device__ __forceinline__ uint32_t pack(float a, float b, float c, float d) {
    return pack_e4m3(a, b, c, d);
  }
};

}  // namespace tessera::cuda::sm90
