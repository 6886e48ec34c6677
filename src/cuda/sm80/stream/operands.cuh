// SPDX-License-Identifier: Apache-2.0
// The operands of stream/kernel.cuh: K and V on their way to shared memory, Q, and K and V from
// there as A operands.
#pragma once

#include "cuda/sm80/machine/e4m3.cuh"
#include "cuda/sm80/machine/load.cuh"
#include "cuda/sm80/stream/shape.cuh"

namespace tessera::cuda::sm80 {

// A block of keys on its way into a stage: rows of one head of k or v, at one distance or in pages.
template <typename S>
class KeyLoader {
 public:
  __device__ KeyLoader(const Params& p, int tensor, const Sequence& sequence, int kv_head,
                       int columns, int thread)
      : view_(p.tensor[tensor]), page_size_(p.page_size) {
    constexpr int kBytes = sizeof(typename S::Stored);
    row_bytes_ = view_.stride[1] * kBytes;
    column_ = thread % kChunks * 16;
    row_ = thread / kChunks;
    bytes_ = min(max(columns * kBytes - column_, 0), 16);
    base_ = static_cast<const char*>(view_.data);
    if (page_size_ != 0) {
      const View& table =
          p.tensor[tensor == TESSERA_K ? TESSERA_PAGE_TABLE_K : TESSERA_PAGE_TABLE_V];
      table_ = static_cast<const int*>(table.data) + offset_of(table, sequence.n);
      table_stride_ = table.stride[1];
      page_bytes_ = view_.stride[0] * kBytes;
      last_page_ = max(tensor == TESSERA_K ? p.pages_k : p.pages_v, 1) - 1;
      if ((tensor == TESSERA_K ? p.pages_k : p.pages_v) == 0) bytes_ = 0;  // zeros
      base_ += offset_of(view_, 0, 0, kv_head) * kBytes;
    } else {
      base_ += offset_of(view_, sequence.k.batch, sequence.k.first, kv_head) * kBytes;
    }
  }

  // Asks for the page of the lane's key of the block at key0: a block ahead of copy(), so that
  // nobody waits. Entries of keys that are not to be seen are not read.
  __device__ void fetch(int key0, const Interval& visible) {
    if (page_size_ == 0) return;
    const int key = key0 + threadIdx.x % S::kKeys;
    page_ = visible.contains(key) ? table_[key / page_size_ * table_stride_] : 0;
  }

  __device__ void copy(char* stage, int key0, const Interval& visible) const {
    constexpr int kRowsAtOnce = 32 * S::kTeam / kChunks;
    static_assert(S::kKeys % kRowsAtOnce == 0);
    const uint32_t to = smem_address(stage) + row_ * S::kStride + column_;
    const char* from = base_ + column_;
    if (page_size_ == 0) {
      from += (key0 + row_) * row_bytes_;
#pragma unroll
      for (int r = 0; r < S::kKeys; r += kRowsAtOnce) {
        copy_row(to + r * S::kStride, from, visible.contains(key0 + row_ + r));
        from += kRowsAtOnce * row_bytes_;
      }
      return;
    }
    const int key = key0 + threadIdx.x % S::kKeys;
    const int64_t offset =
        clamped(page_, 0, last_page_) * page_bytes_ + key % page_size_ * row_bytes_;
#pragma unroll
    for (int r = 0; r < S::kKeys; r += kRowsAtOnce) {
      const int64_t of_row = __shfl_sync(~0u, offset, row_ + r);
      copy_row(to + r * S::kStride, from + of_row, visible.contains(key0 + row_ + r));
    }
  }

 private:
  static constexpr int kChunks = S::kD * sizeof(typename S::Stored) / 16;  // of a row

  // Zeros where the row is not to be seen, whatever lies there.
  __device__ void copy_row(uint32_t to, const char* from, bool seen) const {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to),
                 "l"(seen ? from : static_cast<const char*>(view_.data)), "r"(seen ? bytes_ : 0));
  }

  const View& view_;
  const char* base_;
  const int* table_ = nullptr;
  int64_t row_bytes_, page_bytes_ = 0, table_stride_ = 0;
  int page_size_, last_page_ = 0, page_ = 0;
  int row_, column_, bytes_;
};

// The first `count` of 8 elements of 16 bits, zeros behind them: what lies there may be anything,
// and nobody's.
__device__ inline uint4 first_of(const uint16_t* elements, int count) {
  uint32_t words[4] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i < count) words[i / 2] |= static_cast<uint32_t>(elements[i]) << (i % 2 * 16);
  }
  return {words[0], words[1], words[2], words[3]};
}

// Rows of q into shared memory as elements of the products. For an E4M3 cache the 16 columns of a
// step stand in the order in which its bytes come out of ldmatrix, and the finite values of a row
// are below 2^15.
template <typename T, typename S>
__device__ __forceinline__ void load_q(typename S::Storage& smem, const QueryRows& rows,
                                       const View& view, int columns) {
  constexpr int kVectors = S::kD / 8;
  for (int i = threadIdx.x; i < S::kRows * kVectors; i += S::kThreads) {
    const int row = i / kVectors, column = i % kVectors * 8;
    const char* from = rows(row);
    uint4 x{0, 0, 0, 0};
    if (from && column + 8 <= columns) {
      x = *reinterpret_cast<const uint4*>(from + column * 2);
    } else if (from && column < columns) {
      x = first_of(reinterpret_cast<const uint16_t*>(from) + column, columns - column);
    }
    if constexpr (!S::kFp8) {
      *reinterpret_cast<uint4*>(smem.q + row * S::kQStride + column) = x;
    } else {
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
      for (int lanes = 1; lanes < kVectors; lanes *= 2) {
        most = fmaxf(most, __shfl_xor_sync(~0u, most, lanes));
      }
      // 2^e with most 2^-e in [2^14, 2^15); fp16 has its own range.
      int exponent = 0;
      if (!__is_same(T, __half) && most > 0) exponent = max(ilogbf(most), -112) - 14;
      if (column == 0) smem.q_scale[row] = ldexpf(1.f, exponent);
      const float inverse = ldexpf(1.f, -exponent);
      // Columns 4 q + {0, 1} are elements 2 q and 2 q + 1 of a step, 4 q + {2, 3} those 8 on.
      __half* to = smem.q + row * S::kQStride + column / 16 * 16 + column % 16 / 2;
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        *reinterpret_cast<uint32_t*>(to + w / 2 * 2 + w % 2 * 8) =
            pack<__half>(f[2 * w] * inverse, f[2 * w + 1] * inverse);
      }
    }
  }
}

// Two k16 steps of 16 keys as A operands.
template <typename S>
__device__ __forceinline__ void load_k(uint32_t (&a)[2][4], const char* k, int key, int step) {
  const int lane = threadIdx.x % 32;
  if constexpr (S::kFp8) {
    uint32_t r[4];
    ldmatrix_x4(r, smem_address(k + (key + lane % 16) * S::kStride + 32 * step + lane / 16 * 16));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      a[i][0] = halves_of_e4m3(r[2 * i]), a[i][1] = halves_of_e4m3(r[2 * i + 1]);
      a[i][2] = halves_of_e4m3(r[2 * i] >> 16), a[i][3] = halves_of_e4m3(r[2 * i + 1] >> 16);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      ldmatrix_x4(a[i], smem_address(k + (key + lane % 16) * S::kStride +
                                     (32 * step + 16 * i + lane / 16 * 8) * 2));
    }
  }
}

// Columns 32 piece .. + 31 of 16 keys of v, transposed, as A operands. Of an E4M3 v rows g and
// g + 8 of an operand are columns 2 g and 2 g + 1.
template <typename S>
__device__ __forceinline__ void load_v(uint32_t (&a)[2][4], const char* v, int key, int piece) {
  const int lane = threadIdx.x % 32;
  if constexpr (S::kFp8) {
    uint32_t r[4];
    ldmatrix_x4_transposed(
        r, smem_address(v + (key + lane % 16) * S::kStride + 32 * piece + lane / 16 * 16));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t columns = __byte_perm(r[2 * i + half], 0, 0x3120);
        a[i][2 * half] = halves_of_e4m3(columns),
                 a[i][2 * half + 1] = halves_of_e4m3(columns >> 16);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = key + lane / 16 * 8 + lane % 8;
      ldmatrix_x4_transposed(
          a[i], smem_address(v + row * S::kStride + (32 * piece + 16 * i + lane / 8 % 2 * 8) * 2));
    }
  }
}

}  // namespace tessera::cuda::sm80
