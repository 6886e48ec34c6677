// SPDX-License-Identifier: Apache-2.0
// How K, V and Q come into the shared memory of stream/kernel.cuh.
#pragma once

#include "cuda/common/few/args.h"
#include "cuda/common/few/operands.cuh"
#include "cuda/sm80/machine/load.cuh"
#include "cuda/sm80/stream/shape.cuh"

namespace tessera::cuda::sm80 {

// Blocks of keys on their way into stages: rows of one head of k and of v, at one distance or in
// pages. Each lane finds the row of one key of a block, for those that copy it.
template <typename S>
class KeyCopies {
 public:
  __device__ __forceinline__ KeyCopies(const PartsArgs& args, const Sequence& sequence, int kv_head,
                                       int thread)
      : page_size_(args.page_size), visible_(sequence.band.keys(0, sequence.q.length)) {
    const Params& p = args.params;
    row_ = thread / kChunks;
    column_ = thread % kChunks * 16;
    k_.point(p, TESSERA_K, p.dqk, column_, sequence, kv_head);
    v_.point(p, TESSERA_V, p.dv, column_, sequence, kv_head);
    is_alike_ = k_.table == v_.table && k_.table_stride == v_.table_stride &&
                k_.row_bytes == v_.row_bytes && k_.page_bytes == v_.page_bytes &&
                k_.last_page == v_.last_page;
  }

  // Asks for the page of the lane's key of the block at key0: a block ahead of copy(), so that
  // nobody waits. Entries of keys that are not to be seen are not read.
  __device__ __forceinline__ void fetch(int key0) {
    if (!k_.table) return;
    const int key = key0 + static_cast<int>(threadIdx.x) % S::kKeys;
    const int at = page_size_.quotient(key);
    const bool seen = visible_.contains(key);
    k_.page = seen ? k_.table[at * k_.table_stride] : 0;
    if (!is_alike_) v_.page = seen ? v_.table[at * v_.table_stride] : 0;
  }

  // Zeros where a row is not to be seen, whatever lies there.
  __device__ __forceinline__ void copy(typename S::Stage& stage, int key0) const {
    constexpr int kRowsAtOnce = 32 * S::kTeam / kChunks;
    static_assert(S::kKeys % kRowsAtOnce == 0);
    const int key = key0 + static_cast<int>(threadIdx.x) % S::kKeys;
    const int at = k_.table ? page_size_.quotient(key) : 0;
    const int in_page = key - at * page_size_.divisor;
    const unsigned seen = __ballot_sync(~0u, visible_.contains(key)) >> row_;
    const int64_t k_row = k_.offset_of(key, in_page);
    const int64_t v_row = is_alike_ ? 0 : v_.offset_of(key, in_page);
    const uint32_t k_to = smem_address(stage.k) + row_ * S::kStride + column_;
    const uint32_t v_to = smem_address(stage.v) + row_ * S::kStride + column_;
#pragma unroll
    for (int r = 0; r < S::kKeys; r += kRowsAtOnce) {
      const bool exists = seen >> r & 1;
      const int64_t k_from = __shfl_sync(~0u, k_row, row_ + r);
      const int64_t v_from = is_alike_ ? k_from : __shfl_sync(~0u, v_row, row_ + r);
      copy_chunk(k_to + r * S::kStride, k_.base + (exists ? k_from : 0), exists ? k_.bytes : 0);
      copy_chunk(v_to + r * S::kStride, v_.base + (exists ? v_from : 0), exists ? v_.bytes : 0);
    }
  }

 private:
  static constexpr int kChunks = S::kD * sizeof(typename S::Stored) / 16;  // of a row

  struct Rows {
    const char* base;  // of the thread's column of the first row, or of page 0
    const int* table;  // of this sequence; null: no pages
    int64_t row_bytes, page_bytes, table_stride;
    int bytes;  // of the chunk that exist
    int last_page;
    int page;  // of the lane's key

    __device__ __forceinline__ void point(const Params& p, int tensor, int columns, int column,
                                          const Sequence& sequence, int kv_head) {
      constexpr int kBytes = sizeof(typename S::Stored);
      const View& view = p.tensor[tensor];
      row_bytes = view.stride[1] * kBytes;
      page_bytes = view.stride[0] * kBytes;
      bytes = min(max(columns * kBytes - column, 0), 16);
      page = 0, last_page = 0, table = nullptr, table_stride = 0;
      int64_t at = kv_head * view.stride[2];
      if (p.page_size != 0) {
        const View& pages =
            p.tensor[tensor == TESSERA_K ? TESSERA_PAGE_TABLE_K : TESSERA_PAGE_TABLE_V];
        table = static_cast<const int*>(pages.data) + sequence.n * pages.stride[0];
        table_stride = pages.stride[1];
        const int num_pages = tensor == TESSERA_K ? p.pages_k : p.pages_v;
        last_page = max(num_pages, 1) - 1;
        if (num_pages == 0) bytes = 0;  // zeros
      } else {
        at += sequence.k.batch * view.stride[0] + sequence.k.first * view.stride[1];
      }
      base = static_cast<const char*>(view.data) + at * kBytes + column;
    }
    __device__ __forceinline__ int64_t offset_of(int key, int in_page) const {
      return table ? clamped(page, 0, last_page) * page_bytes + in_page * row_bytes
                   : key * row_bytes;
    }
  };

  __device__ static __forceinline__ void copy_chunk(uint32_t to, const char* from, int bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(bytes));
  }

  const Divisor page_size_;
  const Interval visible_;  // to some row of the sequence
  Rows k_, v_;
  bool is_alike_;  // v's rows lie as k's do
  int row_, column_;
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

// Rows of q into shared memory as elements of the products; copies under way, or for an E4M3 cache
// values. There the 16 columns of a step stand in the order in which its bytes come out of ldmatrix,
// and the finite values of a row are below 2^15.
template <typename T, typename S>
__device__ __forceinline__ void load_q(typename S::Storage& smem, const QueryRows& rows,
                                       const View& view, int columns) {
  constexpr int kVectors = S::kD / 8;
#pragma unroll 1
  for (int i = threadIdx.x; i < S::kRows * kVectors; i += S::kThreads) {
    const int row = i / kVectors, column = i % kVectors * 8;
    const char* from = rows(row);
    if constexpr (!S::kFp8) {
      const int bytes = from ? min(max(columns - column, 0), 8) * 2 : 0;
      copy_async<16>(smem.q + row * S::kQStride + column,
                     bytes > 0 ? from + column * 2 : static_cast<const char*>(view.data), bytes);
    } else {
      uint4 x{0, 0, 0, 0};
      if (from && column + 8 <= columns) {
        x = *reinterpret_cast<const uint4*>(from + column * 2);
      } else if (from && column < columns) {
        x = first_of(reinterpret_cast<const uint16_t*>(from) + column, columns - column);
      }
      uint32_t pairs[4];
      const float scale = halves_of_query<T, kVectors>(x, pairs);
      if (column == 0) smem.q_scale[row] = scale;
      // Columns 4 q + {0, 1} are elements 2 q and 2 q + 1 of a step, 4 q + {2, 3} those 8 on.
      __half* to = smem.q + row * S::kQStride + column / 16 * 16 + column % 16 / 2;
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        *reinterpret_cast<uint32_t*>(to + w / 2 * 2 + w % 2 * 8) = pairs[w];
      }
    }
  }
}

}  // namespace tessera::cuda::sm80
