// SPDX-License-Identifier: Apache-2.0
// Elements of a tensor whose type is known at run time, and the few scalar functions that every
// kernel needs spelled one way.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "cuda/common/params.h"

namespace tessera::cuda {

inline constexpr float kLog2e = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;
inline constexpr float kInfinity = __builtin_huge_valf();

// Stands for a scale of 0, which would make -inf a NaN: the smallest float, 2^-149. It makes at
// most 5e-7 of a finite score, also of a bias before the scale that is -3e38 to hide. Kernels
// multiply by it, which keeps subnormal operands; 1 / kZeroScale is +inf.
inline constexpr float kZeroScale = 1.4e-45f;

// Element i of an array of fp32, bf16 or fp16, as float; int64 offsets are the caller's business.
__device__ inline float load_float(const void* base, int64_t i, int dtype) {
  switch (dtype) {
    case TESSERA_FP32:
      return static_cast<const float*>(base)[i];
    case TESSERA_BF16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(base)[i]);
    case TESSERA_FP16:
      return __half2float(static_cast<const __half*>(base)[i]);
  }
  return 0;
}

// The same of E4M3 or E5M2: a page of instructions each before sm89, so apart.
__device__ inline float load_fp8(const void* base, int64_t i, int dtype) {
  return dtype == TESSERA_E4M3 ? float(static_cast<const __nv_fp8_e4m3*>(base)[i])
                               : float(static_cast<const __nv_fp8_e5m2*>(base)[i]);
}

// Rounds to nearest even.
__device__ inline void store_float(void* base, int64_t i, int dtype, float value) {
  switch (dtype) {
    case TESSERA_FP32:
      static_cast<float*>(base)[i] = value;
      break;
    case TESSERA_BF16:
      static_cast<__nv_bfloat16*>(base)[i] = __float2bfloat16_rn(value);
      break;
    case TESSERA_FP16:
      static_cast<__half*>(base)[i] = __float2half_rn(value);
      break;
  }
}

__device__ inline int64_t offset_of(const View& v, int64_t a, int64_t b = 0, int64_t c = 0,
                                    int64_t d = 0) {
  return a * v.stride[0] + b * v.stride[1] + c * v.stride[2] + d * v.stride[3];
}

// 2^x; -inf gives 0.
__device__ inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x, to 1 ulp; x = +inf gives 0.
__device__ inline float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two floats as one register of 16-bit elements, the first in the low half.
template <typename T>
__device__ uint32_t pack(float low, float high);
template <>
__device__ inline uint32_t pack<__nv_bfloat16>(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
template <>
__device__ inline uint32_t pack<__half>(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// And back; the first of the pair in x.
template <typename T>
__device__ inline float2 unpack(uint32_t packed) {
  if constexpr (__is_same(T, __half)) {
    return __half22float2(*reinterpret_cast<const __half2*>(&packed));
  } else {
    return {__uint_as_float(packed << 16), __uint_as_float(packed & 0xFFFF0000)};
  }
}

}  // namespace tessera::cuda
