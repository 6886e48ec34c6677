// SPDX-License-Identifier: Apache-2.0
// Products of a warp on mma.sync, for 16-bit elements and for fp32 by three fp16 products, and for
// fp32 once more by multiply-adds.
//
// Two forms are enough for attention, forward and backward:
//     multiply_nt   C[16 x N] += A[16 x K] B[N x K]^T   A and B in shared memory    S, dP
//     multiply_nn   C[16 x N] += A[16 x K] B[K x N]     A an accumulator, B there   O, dQ, dK, dV
// An accumulator fragment is the next product's A operand as it lies in registers. Tiles in shared
// memory are row-major with rows of kCols elements and 16 bytes of padding: every ldmatrix then
// meets each bank once.
#pragma once

#include <type_traits>

#include "cuda/common/element.cuh"
#include "cuda/common/mma.cuh"

namespace tessera::cuda::sm80 {

// Elements from one row of a shared tile to the next.
template <typename T, int kColumns>
inline constexpr int kSmemStride = kColumns + 16 / static_cast<int>(sizeof(T));

__device__ inline uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

__device__ inline void ldmatrix_x4_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

// Operands of one step along K. A: 16 x kK. B: a pair of n8 tiles, kK x 16.
template <typename T>
struct Mma;

template <typename T>
struct Mma16 {
  static constexpr int kK = 16;
  struct A {
    uint32_t r[4];
  };
  struct B {
    uint32_t r[4];  // two registers for each n8 tile
  };

  // row, column: of the operand's first element. Lane addresses: rows 0..15, then 16 bytes on.
  __device__ static A load_a(const T* tile, int stride, int row, int column) {
    const int lane = threadIdx.x % 32;
    A a;
    ldmatrix_x4(a.r, smem_address(tile + (row + lane % 16) * stride + column + lane / 16 * 8));
    return a;
  }
  __device__ static B load_b(const T* tile, int stride, int n, int k) {
    const int lane = threadIdx.x % 32;
    B b;
    ldmatrix_x4(
        b.r, smem_address(tile + (n + lane / 16 * 8 + lane % 8) * stride + k + lane / 8 % 2 * 8));
    return b;
  }
  __device__ static B load_b_transposed(const T* tile, int stride, int k, int n) {
    const int lane = threadIdx.x % 32;
    B b;
    ldmatrix_x4_transposed(b.r, smem_address(tile + (k + lane % 16) * stride + n + lane / 16 * 8));
    return b;
  }
  // A of 16 rows from m on, from a tile that holds it transposed.
  __device__ static A load_a_transposed(const T* tile, int stride, int k, int m) {
    const int lane = threadIdx.x % 32;
    A a;
    ldmatrix_x4_transposed(
        a.r, smem_address(tile + (k + lane / 16 * 8 + lane % 8) * stride + m + lane / 8 % 2 * 8));
    return a;
  }
  __device__ static float scale_of(const T*, int, int) { return 1; }
  __device__ static A from_accumulator(const float* c, float) {
    return {{pack<T>(c[0], c[1]), pack<T>(c[2], c[3]), pack<T>(c[4], c[5]), pack<T>(c[6], c[7])}};
  }
  // c: the accumulators of the pair, 8 floats.
  template <bool kTransposed = false>
  __device__ static void multiply(float* c, const A& a, const B& b, float = 1) {
    multiply_16x8<T>(c, a.r, b.r);
    multiply_16x8<T>(c + 4, a.r, b.r + 2);
  }
};
template <>
struct Mma<__nv_bfloat16> : Mma16<__nv_bfloat16> {};
template <>
struct Mma<__half> : Mma16<__half> {};

// fp32: x = (hi + lo) / f with hi and lo in fp16 (11 + 11 bits), f a power of two that brings the
// largest of 16 rows to 2^14 .. 2^15: what fp16 cannot hold is then 2^-40 of that largest. The
// product is lo hi + hi lo + hi hi; the tensor core adds with truncation, so each step's sum joins
// C by an ordinary, rounding, multiply-add, which also undoes the two f. hi is rounded and lo cut,
// so that hi + lo splits into hi and lo again: a row with one visible key has o = hi + lo of its v,
// and dO V^T and dO O^T must cancel exactly. (tf32 has the same bits at half the rate.)
//
// split_tile() turns rows of a shared tile, kColumns floats and 16 bytes of padding, into kColumns
// halves hi, kColumns halves lo, and 1 / f in the padding.
template <>
struct Mma<float> {
  static constexpr int kK = 16;
  struct A {
    uint32_t hi[4], lo[4];
  };
  using B = A;

  __device__ static A load_a(const float* tile, int stride, int row, int column) {
    const int lane = threadIdx.x % 32;
    return load<false>(tile + (row + lane % 16) * stride, stride, column + lane / 16 * 8);
  }
  __device__ static B load_b(const float* tile, int stride, int n, int k) {
    const int lane = threadIdx.x % 32;
    return load<false>(tile + (n + lane / 16 * 8 + lane % 8) * stride, stride,
                       k + lane / 8 % 2 * 8);
  }
  __device__ static B load_b_transposed(const float* tile, int stride, int k, int n) {
    const int lane = threadIdx.x % 32;
    return load<true>(tile + (k + lane % 16) * stride, stride, n + lane / 16 * 8);
  }
  __device__ static A load_a_transposed(const float* tile, int stride, int k, int m) {
    const int lane = threadIdx.x % 32;
    return load<true>(tile + (k + lane / 16 * 8 + lane % 8) * stride, stride, m + lane / 8 % 2 * 8);
  }
  // 1 / f of the 16 rows from `row` on.
  __device__ static float scale_of(const float* tile, int stride, int row) {
    return tile[row * stride + stride - 4];
  }
  __device__ static A from_accumulator(const float* c, float f) {
    A a;
#pragma unroll
    for (int i = 0; i < 4; ++i) split(c[2 * i] * f, c[2 * i + 1] * f, a.hi[i], a.lo[i]);
    return a;
  }
  // kTransposed: A and B have traded places, and so do the two mixed products.
  template <bool kTransposed = false>
  __device__ static void multiply(float* c, const A& a, const B& b, float factor) {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      float sum[4] = {0, 0, 0, 0};
      multiply_16x8<__half>(sum, kTransposed ? a.hi : a.lo, (kTransposed ? b.lo : b.hi) + 2 * tile);
      multiply_16x8<__half>(sum, kTransposed ? a.lo : a.hi, (kTransposed ? b.hi : b.lo) + 2 * tile);
      multiply_16x8<__half>(sum, a.hi, b.hi + 2 * tile);
#pragma unroll
      for (int i = 0; i < 4; ++i) c[4 * tile + i] += sum[i] * factor;
    }
  }

  __device__ static void split(float x, float y, uint32_t& hi, uint32_t& lo) {
    hi = pack<__half>(x, y);
    const float2 rounded = __half22float2(*reinterpret_cast<const __half2*>(&hi));
    asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(lo) : "f"(y - rounded.y), "f"(x - rounded.x));
  }

 private:
  template <bool kTransposed>
  __device__ static A load(const float* row, int stride, int column) {
    const uint32_t hi = smem_address(row) + column * 2, lo = hi + (stride - 4) * 2;
    A a;
    if constexpr (kTransposed) {
      ldmatrix_x4_transposed(a.hi, hi);
      ldmatrix_x4_transposed(a.lo, lo);
    } else {
      ldmatrix_x4(a.hi, hi);
      ldmatrix_x4(a.lo, lo);
    }
    return a;
  }
};

// f and 1 / f from the bits of the largest magnitude.
struct SplitScale {
  float f, inverse;
  __device__ explicit SplitScale(uint32_t largest) {
    const int exponent = min(max(static_cast<int>(largest >> 23), 15), 254);
    f = __int_as_float((127 + 141 - exponent) << 23);
    inverse = __int_as_float((exponent - 14) << 23);
  }
};

template <typename T>
inline constexpr bool kSplits = __is_same(T, float);

// fp32 tiles must be split before products read them, in place, 16 rows a warp; barriers before and
// after are the caller's. Nothing for 16-bit elements. warp: of kWarps that share the work.
template <typename T, int kRows, int kColumns, int kWarps>
__device__ __forceinline__ void split_tile(T* tile, int warp) {
  if constexpr (kSplits<T>) {
    constexpr int kStride = kSmemStride<T, kColumns>, kChunks = kColumns / 4;
    constexpr int kRowsAtOnce = kChunks <= 16 ? 2 : 1, kLanes = 32 / kRowsAtOnce;
    constexpr int kEach = (kChunks + kLanes - 1) / kLanes;  // chunks of a row that a lane has
    const int lane = threadIdx.x % 32, row_of_lane = lane / kLanes, chunk = lane % kLanes;
    for (int row0 = 16 * warp; row0 < kRows; row0 += 16 * kWarps) {
      float* rows = tile + (row0 + row_of_lane) * kStride;
      const auto chunk_of = [&](int row, int i) -> float4 {
        if (kChunks % kLanes != 0 && chunk + i * kLanes >= kChunks) return {0, 0, 0, 0};
        return *reinterpret_cast<const float4*>(rows + row * kStride + (chunk + i * kLanes) * 4);
      };
      float largest = 0;
#pragma unroll
      for (int row = 0; row < 16; row += kRowsAtOnce) {
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
          const float4 x = chunk_of(row, i);
          largest =
              fmaxf(fmaxf(largest, fmaxf(fabsf(x.x), fabsf(x.y))), fmaxf(fabsf(x.z), fabsf(x.w)));
        }
      }
      const SplitScale scale(__reduce_max_sync(~0u, __float_as_uint(largest)));
      constexpr int kBatch = kEach >= 4 ? 1 : 4 / kEach;  // rows in flight
#pragma unroll
      for (int first = 0; first < 16; first += kBatch * kRowsAtOnce) {
        float4 x[kBatch][kEach];
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
#pragma unroll
          for (int i = 0; i < kEach; ++i) x[j][i] = chunk_of(first + j * kRowsAtOnce, i);
        }
        __syncwarp();  // the rows are read; they are written over
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
          float* row = rows + (first + j * kRowsAtOnce) * kStride;
#pragma unroll
          for (int i = 0; i < kEach; ++i) {
            if (kChunks % kLanes != 0 && chunk + i * kLanes >= kChunks) break;
            uint2 hi, lo;
            Mma<float>::split(x[j][i].x * scale.f, x[j][i].y * scale.f, hi.x, lo.x);
            Mma<float>::split(x[j][i].z * scale.f, x[j][i].w * scale.f, hi.y, lo.y);
            float* to = row + (chunk + i * kLanes) * 2;
            *reinterpret_cast<uint2*>(to) = hi;
            *reinterpret_cast<uint2*>(to + kColumns / 2) = lo;
          }
          if (chunk == 0) row[kColumns] = scale.inverse;
        }
      }
    }
  }
}

// Wide products (kSkip) leave out blocks of this many columns that lie past the true head dim.
inline constexpr int kBlock = 64;
template <int kColumns>
inline constexpr bool kSkipsBlocks = kColumns > 2 * kBlock;

template <bool kFirst, typename A, typename B>
__device__ __forceinline__ auto& first_if(A& a, B& b) {
  if constexpr (kFirst) {
    return a;
  } else {
    return b;
  }
}

// c += A rows a_row .. + 15, times all kN rows of B; both K axes are head dims, zero beyond
// `depth`. kRounds: blocks of wide heads join C by rounding additions. The tensor core truncates as
// it adds, always towards zero; over 576 columns that is 10^-4 of a logit.
template <typename T, int kN, int kK, bool kSkip = kSkipsBlocks<kK>, bool kTransposed = false,
          bool kRounds = false>
__device__ __forceinline__ void multiply_nt(float (&c)[kN / 2], const T* a, int a_row, const T* b,
                                            int depth) {
  constexpr int kStride = kSmemStride<T, kK>, kStep = Mma<T>::kK;
  constexpr int kUnroll = kSkip ? 1 : kK / kBlock;
  const float scale_a = Mma<T>::scale_of(a, kStride, a_row);
  float scale_b[kN / 16];
#pragma unroll
  for (int n = 0; n < kN; n += 16) scale_b[n / 16] = Mma<T>::scale_of(b, kStride, n);
#pragma unroll kUnroll
  for (int block = 0; block < kK; block += kBlock) {
    if (kSkip && block >= depth) break;
    float of_block[kN / 2];
    auto& sum = first_if<kRounds>(of_block, c);
    if constexpr (kRounds) {
#pragma unroll
      for (float& x : of_block) x = 0;
    }
#pragma unroll
    for (int k = block; k < block + kBlock; k += kStep) {
      const typename Mma<T>::A a_step = Mma<T>::load_a(a, kStride, a_row, k);
#pragma unroll
      for (int n = 0; n < kN; n += 16) {
        const typename Mma<T>::B b_step = Mma<T>::load_b(b, kStride, n, k);
        Mma<T>::template multiply<kTransposed>(sum + n / 2, a_step, b_step,
                                               scale_a * scale_b[n / 16]);
      }
    }
    if constexpr (kRounds) {
#pragma unroll
      for (int i = 0; i < kN / 2; ++i) c[i] += of_block[i];
    }
  }
}

// The same by all warps of a CTA for any number of tiles, between barriers: what was copied is seen
// by all, and so is what this makes of it.
template <typename T, int kColumns, int kWarps, int... kRows, typename... Tiles>
__device__ __forceinline__ void meet_and_split(Tiles*... tiles) {
  __syncthreads();
  if constexpr (kSplits<T>) {
    (split_tile<T, kRows, kColumns, kWarps>(tiles, threadIdx.x / 32), ...);
    __syncthreads();
  }
}

// What brings a warp's fragment into the range of fp16.
template <typename T, int kN>
__device__ __forceinline__ SplitScale scale_of_fragment(const float (&c)[kN / 2]) {
  float largest = 0;
  if constexpr (kSplits<T>) {
#pragma unroll
    for (int e = 0; e < kN / 2; ++e) largest = fmaxf(largest, fabsf(c[e]));
    return SplitScale(__reduce_max_sync(~0u, __float_as_uint(largest)));
  }
  return SplitScale(0);
}

// c += a (accumulators of kK columns) times the kK rows of B, columns [first, first + kN) of the
// tile's kColumns; columns at or beyond `width` are skipped by blocks.
template <typename T, int kN, int kK, int kColumns, bool kSkip = kSkipsBlocks<kColumns>>
__device__ __forceinline__ void multiply_nn(float (&c)[kN / 2], const float (&a)[kK / 2],
                                            const T* b, int first, int width) {
  constexpr int kStride = kSmemStride<T, kColumns>, kStep = Mma<T>::kK;
  typename Mma<T>::A a_steps[kK / kStep];  // 16-bit: half the registers of a
  const SplitScale scale = scale_of_fragment<T, kK>(a);
#pragma unroll
  for (int k = 0; k < kK; k += kStep) {
    a_steps[k / kStep] = Mma<T>::from_accumulator(a + k / 2, scale.f);
  }
#pragma unroll
  for (int block = 0; block < kN; block += kBlock) {
    if (kSkip && first + block >= width) break;
#pragma unroll
    for (int k = 0; k < kK; k += kStep) {
      const float scale_b = Mma<T>::scale_of(b, kStride, k);
#pragma unroll
      for (int n = block; n < block + kBlock && n < kN; n += 16) {
        const typename Mma<T>::B b_step = Mma<T>::load_b_transposed(b, kStride, k, first + n);
        Mma<T>::multiply(c + n / 2, a_steps[k / kStep], b_step, scale.inverse * scale_b);
      }
    }
  }
}

}  // namespace tessera::cuda::sm80
