// SPDX-License-Identifier: Apache-2.0
// Operands of the products of few rows: K and V from shared memory as A operands of 16 keys or 16
// columns. An E4M3 cache becomes fp16, which holds it exactly, on the way.
//
// S says how rows lie there: S::lane_address(tile, row, unit) is where a lane begins, with its own
// row and unit of 16 bytes, and S::at(that, unit) an even unit further.
#pragma once

#include "cuda/common/element.cuh"
#include "cuda/common/mma.cuh"

namespace tessera::cuda {

__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// Transposes an 8 x 8 matrix of 16-bit elements that lies in a warp as an accumulator does.
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t x) {
  uint32_t y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// The two E4M3 of the low 16 bits as fp16. One instruction from sm89 on.
__device__ __forceinline__ uint32_t halves_of_e4m3(uint32_t pair) {
  const __half2_raw halves =
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(pair), __NV_E4M3);
  return halves.x | static_cast<uint32_t>(halves.y) << 16;
}

// The two E5M2 of the low 16 bits as fp16, of which they are the upper bytes.
__device__ __forceinline__ uint32_t halves_of_e5m2(uint32_t pair) {
  return __byte_perm(pair, 0, 0x1404);
}
// The two of an S's cache.
template <typename S>
__device__ __forceinline__ uint32_t halves_of_fp8(uint32_t pair) {
  if constexpr (S::kE5m2) return halves_of_e5m2(pair);
  return halves_of_e4m3(pair);
}

// Eight elements of a row of q, of which as many lanes side by side have one, as pairs of fp16 whose
// finite values are below 2^15 in each row. Returns what they have been divided by.
template <typename T, int kLanes>
__device__ __forceinline__ float halves_of_query(const uint4& x, uint32_t (&pairs)[4]) {
  const uint32_t words[4] = {x.x, x.y, x.z, x.w};
  float f[8], most = 0;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const float2 pair = unpack<T>(words[w]);
    f[2 * w] = pair.x, f[2 * w + 1] = pair.y;
  }
#pragma unroll
  for (const float value : f) most = fmaxf(most, fabsf(value) < kInfinity ? fabsf(value) : 0);
#pragma unroll
  for (int lanes = 1; lanes < kLanes; lanes *= 2) {
    most = fmaxf(most, __shfl_xor_sync(~0u, most, lanes));
  }
  // 2^e with most 2^-e in [2^14, 2^15); fp16 has its own range.
  int exponent = 0;
  if (!__is_same(T, __half) && most > 0) exponent = max(ilogbf(most), -112) - 14;
  const float inverse = ldexpf(1.f, -exponent);
#pragma unroll
  for (int w = 0; w < 4; ++w) pairs[w] = pack<__half>(f[2 * w] * inverse, f[2 * w + 1] * inverse);
  return ldexpf(1.f, exponent);
}

// What an fp8 k of this sequence and head was divided by; 1 without.
__device__ inline float k_scale_of(const Params& p, int n, int kv_head) {
  const View& scales = p.tensor[TESSERA_K_SCALE];
  return scales.data ? load_float(scales.data, offset_of(scales, n, kv_head), TESSERA_FP32) : 1.f;
}

// Where the lanes of a warp begin to load 16 keys of K, V, or 8 rows of q.
template <typename S>
__device__ __forceinline__ uint32_t k_lanes(uint32_t tile, int key) {
  const int lane = threadIdx.x % 32;
  return S::lane_address(tile, key + lane % 16, lane / 16);
}
template <typename S>
__device__ __forceinline__ uint32_t v_lanes(uint32_t tile, int key) {
  const int lane = threadIdx.x % 32;
  if constexpr (S::kFp8) return S::lane_address(tile, key + lane % 16, lane / 16);
  return S::lane_address(tile, key + lane / 16 * 8 + lane % 8, lane / 8 % 2);
}

// Columns 32 step .. + 31 of 16 keys: two k16 steps.
template <typename S>
__device__ __forceinline__ void load_k(uint32_t (&a)[2][4], uint32_t lanes, int step) {
  if constexpr (S::kFp8) {
    uint32_t r[4];
    load_matrices(r, S::at(lanes, 2 * step));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      a[i][0] = halves_of_fp8<S>(r[2 * i]), a[i][1] = halves_of_fp8<S>(r[2 * i + 1]);
      a[i][2] = halves_of_fp8<S>(r[2 * i] >> 16), a[i][3] = halves_of_fp8<S>(r[2 * i + 1] >> 16);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) load_matrices(a[i], S::at(lanes, 4 * step + 2 * i));
  }
}

// Columns 32 piece .. + 31 of 16 keys of v, transposed. Of an fp8 v rows g and g + 8 of an operand
// are columns 2 g and 2 g + 1. kept: bits of the lane's keys 2 (l % 4) and the next, and of those 8
// on, where memory may hold anything for keys that nobody sees.
template <typename S>
__device__ __forceinline__ void load_v(uint32_t (&a)[2][4], uint32_t lanes, int piece,
                                       const uint32_t (&kept)[2]) {
  if constexpr (S::kFp8) {
    uint32_t r[4];
    load_matrices_transposed(r, S::at(lanes, 2 * piece));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t pairs = r[2 * i + half];
        if constexpr (S::kKeepsHidden) pairs &= kept[half];
        const uint32_t columns = __byte_perm(pairs, 0, 0x3120);
        a[i][2 * half] = halves_of_fp8<S>(columns);
        a[i][2 * half + 1] = halves_of_fp8<S>(columns >> 16);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      load_matrices_transposed(a[i], S::at(lanes, 4 * piece + 2 * i));
#pragma unroll
      for (int j = 0; S::kKeepsHidden && j < 4; ++j) a[i][j] &= kept[j / 2];
    }
  }
}

}  // namespace tessera::cuda
