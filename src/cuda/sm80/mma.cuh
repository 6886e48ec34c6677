// SPDX-License-Identifier: Apache-2.0
// Products of a warp on mma.sync, for 16-bit elements and for fp32 by three tf32 products.
//
// Two forms are enough for attention, forward and backward:
//     multiply_nt   C[16 x N] += A[16 x K] B[N x K]^T   A and B in shared memory        S, dP
//     multiply_nn   C[16 x N] += A[16 x K] B[K x N]     A an accumulator, B in smem     O, dQ, dK, dV
// An accumulator fragment is the next product's A operand as it lies in registers. Tiles in shared
// memory are row-major with rows of kCols elements and 16 bytes of padding: every ldmatrix then meets
// each bank once.
#pragma once

#include "cuda/common/element.cuh"

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
    ldmatrix_x4(b.r, smem_address(tile + (n + lane / 16 * 8 + lane % 8) * stride + k + lane / 8 % 2 * 8));
    return b;
  }
  __device__ static B load_b_transposed(const T* tile, int stride, int k, int n) {
    const int lane = threadIdx.x % 32;
    B b;
    ldmatrix_x4_transposed(b.r, smem_address(tile + (k + lane % 16) * stride + n + lane / 16 * 8));
    return b;
  }
  __device__ static A from_accumulator(const float* c) {
    return {{pack<T>(c[0], c[1]), pack<T>(c[2], c[3]), pack<T>(c[4], c[5]), pack<T>(c[6], c[7])}};
  }
  // c: the accumulators of the pair, 8 floats.
  template <bool kTransposed = false>
  __device__ static void multiply(float* c, const A& a, const B& b) {
    multiply_n8(c, a, b.r[0], b.r[1]);
    multiply_n8(c + 4, a, b.r[2], b.r[3]);
  }

 private:
  __device__ static void multiply_n8(float* c, const A& a, uint32_t b0, uint32_t b1) {
    if constexpr (sizeof(T) == 2 && __is_same(T, __half)) {
      asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
          "{%8, %9}, {%0, %1, %2, %3};"
          : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
          : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b0), "r"(b1));
    } else {
      asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
          "{%8, %9}, {%0, %1, %2, %3};"
          : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
          : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b0), "r"(b1));
    }
  }
};
template <>
struct Mma<__nv_bfloat16> : Mma16<__nv_bfloat16> {};
template <>
struct Mma<__half> : Mma16<__half> {};

// fp32: x = hi + lo in tf32 (11 + 11 bits), and the product is lo hi + hi lo + hi hi. The tensor core
// adds with truncation, so each step's small sum is added to C by an ordinary, rounding, addition. hi is
// rounded and lo cut, so that hi + lo splits into hi and lo again: a row with one visible key has
// o = hi + lo of its v, and dO V^T and dO O^T must cancel exactly.
template <>
struct Mma<float> {
  static constexpr int kK = 8;
  struct A {
    float r[4];
  };
  struct B {
    float r[4];
  };

  __device__ static A load_a(const float* tile, int stride, int row, int column) {
    const int lane = threadIdx.x % 32;
    uint32_t r[4];
    ldmatrix_x4(r, smem_address(tile + (row + lane % 16) * stride + column + lane / 16 * 4));
    return {{__uint_as_float(r[0]), __uint_as_float(r[1]), __uint_as_float(r[2]),
             __uint_as_float(r[3])}};
  }
  __device__ static B load_b(const float* tile, int stride, int n, int k) {
    const int lane = threadIdx.x % 32;
    uint32_t r[4];
    ldmatrix_x4(r, smem_address(tile + (n + lane / 16 * 8 + lane % 8) * stride + k + lane / 8 % 2 * 4));
    return {{__uint_as_float(r[0]), __uint_as_float(r[1]), __uint_as_float(r[2]),
             __uint_as_float(r[3])}};
  }
  // Row order of K within a step as from_accumulator has it: 2t and 2t + 1 for t and t + 4.
  __device__ static B load_b_transposed(const float* tile, int stride, int k, int n) {
    const int lane = threadIdx.x % 32;
    const float* at = tile + (k + lane % 4 * 2) * stride + n + lane / 4;
    return {{at[0], at[stride], at[8], at[stride + 8]}};
  }
  __device__ static A from_accumulator(const float* c) { return {{c[0], c[2], c[1], c[3]}}; }

  // kTransposed: A and B have traded places, and so do the two mixed products.
  template <bool kTransposed = false>
  __device__ static void multiply(float* c, const A& a, const B& b) {
    uint32_t a_hi[4], a_lo[4], b_hi[4], b_lo[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      split(a.r[i], a_hi[i], a_lo[i]);
      split(b.r[i], b_hi[i], b_lo[i]);
    }
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      float sum[4] = {0, 0, 0, 0};
      multiply_n8(sum, kTransposed ? a_hi : a_lo, (kTransposed ? b_lo : b_hi) + 2 * tile);
      multiply_n8(sum, kTransposed ? a_lo : a_hi, (kTransposed ? b_hi : b_lo) + 2 * tile);
      multiply_n8(sum, a_hi, b_hi + 2 * tile);
#pragma unroll
      for (int i = 0; i < 4; ++i) c[4 * tile + i] += sum[i];
    }
  }

 private:
  __device__ static void split(float x, uint32_t& hi, uint32_t& lo) {
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(hi) : "f"(x));
    lo = __float_as_uint(x - __uint_as_float(hi)) & 0xFFFFE000;
  }
  __device__ static void multiply_n8(float* c, const uint32_t* a, const uint32_t* b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
};

// Wide products (kSkip) leave out blocks of this many columns that lie past the true head dim.
inline constexpr int kBlock = 64;
template <int kColumns>
inline constexpr bool kSkipsBlocks = kColumns > 2 * kBlock;

// c[r] += A rows a_row + 16 r .. + 15, times all kN rows of B; both K axes are head dims, zero beyond
// `depth`.
template <typename T, int kRowTiles, int kN, int kK, bool kSkip = kSkipsBlocks<kK>,
          bool kTransposed = false>
__device__ __forceinline__ void multiply_nt(float (&c)[kRowTiles][kN / 2], const T* a, int a_row,
                                            const T* b, int depth) {
  constexpr int kStride = kSmemStride<T, kK>, kStep = Mma<T>::kK;
  constexpr int kUnroll = kSkip ? 1 : kK / kBlock;
#pragma unroll kUnroll
  for (int block = 0; block < kK; block += kBlock) {
    if (kSkip && block >= depth) break;
#pragma unroll
    for (int k = block; k < block + kBlock; k += kStep) {
      typename Mma<T>::A a_step[kRowTiles];
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        a_step[r] = Mma<T>::load_a(a, kStride, a_row + 16 * r, k);
      }
#pragma unroll
      for (int n = 0; n < kN; n += 16) {
        const typename Mma<T>::B b_step = Mma<T>::load_b(b, kStride, n, k);
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
          Mma<T>::template multiply<kTransposed>(c[r] + n / 2, a_step[r], b_step);
        }
      }
    }
  }
}

// c[r] += a[r] (accumulators of kK columns) times the kK rows of B, columns [first, first + kN) of
// the tile's kColumns; columns at or beyond `width` are skipped by blocks.
template <typename T, int kRowTiles, int kN, int kK, int kColumns,
          bool kSkip = kSkipsBlocks<kColumns>>
__device__ __forceinline__ void multiply_nn(float (&c)[kRowTiles][kN / 2],
                                            const float (&a)[kRowTiles][kK / 2], const T* b,
                                            int first, int width) {
  constexpr int kStride = kSmemStride<T, kColumns>, kStep = Mma<T>::kK;
  typename Mma<T>::A a_steps[kRowTiles][kK / kStep];  // 16-bit: half the registers of a
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
    for (int k = 0; k < kK; k += kStep) a_steps[r][k / kStep] = Mma<T>::from_accumulator(a[r] + k / 2);
  }
#pragma unroll
  for (int block = 0; block < kN; block += kBlock) {
    if (kSkip && first + block >= width) break;
#pragma unroll
    for (int k = 0; k < kK; k += kStep) {
#pragma unroll
      for (int n = block; n < block + kBlock && n < kN; n += 16) {
        const typename Mma<T>::B b_step = Mma<T>::load_b_transposed(b, kStride, k, first + n);
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
          Mma<T>::multiply(c[r] + n / 2, a_steps[r][k / kStep], b_step);
        }
      }
    }
  }
}

}  // namespace tessera::cuda::sm80
