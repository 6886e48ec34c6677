// SPDX-License-Identifier: Apache-2.0
// What the lean kernels, of 16-bit elements, are made of: copies of tiles by pointers that run, and
// products of several row tiles a warp, which share every fragment of B.
#pragma once

#include "cuda/sm80/machine/load.cuh"

namespace tessera::cuda::sm80 {

// The part of a tile that a thread copies: the same 16 bytes of every kRowsAtOnce-th row.
template <typename T, int kRows, int kColumns, int kThreads>
struct CopyLane {
  static constexpr int kChunks = kColumns / 8;
  static constexpr int kLanes = kChunks <= 8 ? 8 : kChunks <= 16 ? 16 : 32;  // of a row
  static constexpr int kRowsAtOnce = kThreads / kLanes;
  static_assert(kRows % kRowsAtOnce == 0);

  __device__ static int row() { return threadIdx.x / kLanes; }
  __device__ static int column() { return threadIdx.x % kLanes * 8; }
  // Row row() + i of the tile; what is not of the `bytes` becomes zeros.
  __device__ static void copy(T* tile, int i, const char* from, int bytes) {
    if (kChunks < kLanes && column() >= kColumns) return;
    copy_async<16>(tile + (row() + i) * kSmemStride<T, kColumns> + column(), from, bytes);
  }
};

// Copies of tiles of kRows keys of one head, the last one first.
template <typename T, int kRows, int kColumns, int kThreads>
class KeyCopies : CopyLane<T, kRows, kColumns, kThreads> {
  using Lane = CopyLane<T, kRows, kColumns, kThreads>;
  using Lane::column, Lane::copy, Lane::kRowsAtOnce, Lane::row;

 public:
  // columns: of the head; the tile's others become zeros.
  __device__ KeyCopies(const char* base, int64_t row_bytes, int key0, int columns)
      : step_(kRowsAtOnce * row_bytes),
        back_(2 * kRows * row_bytes),
        bytes_(min(max(columns - column(), 0), 8) * 2),
        from_(base + (key0 + row()) * row_bytes + (bytes_ > 0 ? column() * 2 : 0)) {}

  // The tile whose first `valid` rows exist; the others become zeros.
  __device__ __forceinline__ void first(T* tile, int valid) {
    const char* const row0 = from_ - row() * (step_ / kRowsAtOnce);
#pragma unroll
    for (int i = 0; i < kRows; i += kRowsAtOnce) {
      const bool here = row() + i < valid;
      copy(tile, i, here ? from_ : row0, here ? bytes_ : 0);
      from_ += step_;
    }
    finish();
  }
  // Leaves out as many tiles.
  __device__ __forceinline__ void skip(int tiles) { from_ -= tiles * (back_ / 2); }
  // The tile before it.
  __device__ __forceinline__ void next(T* tile) {
#pragma unroll
    for (int i = 0; i < kRows; i += kRowsAtOnce) {
      copy(tile, i, from_, bytes_);
      from_ += step_;
      asm volatile("" : "+l"(from_));  // multiples of the step are not worth their registers
    }
    finish();
  }

 private:
  __device__ void finish() {
    from_ -= back_;
    commit_copies();
  }

  int64_t step_, back_;
  int bytes_;
  const char* from_;
};

// Copies of tiles of kRows queries of q or do: the `steps` tiles of a head from query0 on, then
// those of the next head. Rows at and beyond the length become zeros.
template <typename T, int kRows, int kColumns, int kThreads>
class QueryCopies : CopyLane<T, kRows, kColumns, kThreads> {
  using Lane = CopyLane<T, kRows, kColumns, kThreads>;
  using Lane::column, Lane::copy, Lane::kRowsAtOnce, Lane::row;

 public:
  __device__ QueryCopies(const QueryRows& rows, int query0, int steps, int columns)
      : length_(rows.length - query0),
        steps_(steps),
        row_bytes_(rows.row_bytes),
        to_head_(rows.head_bytes - int64_t{steps - 1} * kRows * rows.row_bytes),
        bytes_(min(max(columns - column(), 0), 8) * 2),
        head_bytes_(rows.head_bytes),
        first_(rows.base + (query0 + row()) * rows.row_bytes + (bytes_ > 0 ? column() * 2 : 0)),
        from_(first_) {}

  // Goes to tile `step` of the head-th head.
  __device__ __forceinline__ void seek(int head, int step) {
    step_ = step;
    from_ = first_ + head * head_bytes_ + int64_t{step} * kRows * row_bytes_;
  }

  // Rows of the next tile that exist; at least one.
  __device__ int valid() const { return length_ - step_ * kRows; }
  __device__ bool ends_head() const { return step_ == steps_ - 1; }

  __device__ __forceinline__ void next(T* tile) {
    const char* const row0 = from_ - row() * row_bytes_;
    const char* at = from_;
#pragma unroll
    for (int i = 0; i < kRows; i += kRowsAtOnce) {
      const bool here = row() + i < valid();
      copy(tile, i, here ? at : row0, here ? bytes_ : 0);
      at += kRowsAtOnce * row_bytes_;
      asm volatile("" : "+l"(at));  // multiples of the step are not worth their registers
    }
    from_ += ends_head() ? to_head_ : kRows * row_bytes_;
    step_ = ends_head() ? 0 : step_ + 1;
  }

 private:
  int step_ = 0;
  int length_, steps_;
  int64_t row_bytes_, to_head_;
  int bytes_;
  int64_t head_bytes_;  // with first_, for seek()
  const char *first_, *from_;
};

template <int kRowTiles, int kCount>
__device__ __forceinline__ void clear(float (&c)[kRowTiles][kCount]) {
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
    for (int e = 0; e < kCount; ++e) c[r][e] = 0;
  }
}

// The first kHeld columns of a row tile, in registers.
template <typename T, int kHeld>
struct HeldColumns {
  typename Mma<T>::A step[kHeld / 16];
};
template <typename T>
struct HeldColumns<T, 0> {};

// c += A B^T with A the rows a_row + 16 r, and B all kN rows of a tile of kK columns. held: columns
// of the one row tile that need not be read.
template <typename T, int kRowTiles, int kN, int kK, int kHeld = 0>
__device__ __forceinline__ void multiply_rows(float (&c)[kRowTiles][kN / 2], const T* a, int a_row,
                                              const T* b, const HeldColumns<T, kHeld>& held = {}) {
  constexpr int kStride = kSmemStride<T, kK>;
  static_assert(kHeld == 0 || kRowTiles == 1);
#pragma unroll
  for (int k = 0; k < kK; k += 16) {
    typename Mma<T>::A a_step[kRowTiles];
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      if constexpr (kHeld > 0) {
        if (k < kHeld) {
          a_step[r] = held.step[k / 16];
          continue;
        }
      }
      a_step[r] = Mma<T>::load_a(a, kStride, a_row + 16 * r, k);
    }
#pragma unroll
    for (int n = 0; n < kN; n += 16) {
      const typename Mma<T>::B b_step = Mma<T>::load_b(b, kStride, n, k);
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) Mma<T>::multiply(c[r] + n / 2, a_step[r], b_step);
    }
  }
}

// c += A B with A the rows row + 16 r of a tile of kK columns, and B, kK rows of kColumns columns,
// from column `first` on.
template <typename T, int kRowTiles, int kN, int kK, int kColumns>
__device__ __forceinline__ void multiply_row_tiles(float (&c)[kRowTiles][kN / 2], const T* a,
                                                   int row, const T* b, int first) {
#pragma unroll
  for (int k = 0; k < kK; k += 16) {
    typename Mma<T>::A a_step[kRowTiles];
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      a_step[r] = Mma<T>::load_a(a, kSmemStride<T, kK>, row + 16 * r, k);
    }
#pragma unroll
    for (int n = 0; n < kN; n += 16) {
      const auto b_step = Mma<T>::load_b_transposed(b, kSmemStride<T, kColumns>, k, first + n);
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) Mma<T>::multiply(c[r] + n / 2, a_step[r], b_step);
    }
  }
}

}  // namespace tessera::cuda::sm80
