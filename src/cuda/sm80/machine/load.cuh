// SPDX-License-Identifier: Apache-2.0
// Loads from strided global rows into padded shared tiles, by cp.async where alignment allows. Rows
// that do not exist arrive as zeros, so that nothing outside the problem, NaN included, is ever
// read.
#pragma once

#include "cuda/common/score/score.cuh"
#include "cuda/sm80/machine/mma.cuh"

namespace tessera::cuda::sm80 {

template <int kBytes>
__device__ inline void copy_async(void* smem, const void* global, int bytes) {
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem_address(smem)),
                 "l"(global), "r"(bytes));
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(smem_address(smem)),
                 "l"(global), "r"(bytes), "n"(kBytes));
  }
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;"); }
template <int kPending>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending));
}

// Rows of one head of q, o, do: positions [0, length) of a sequence, or of `pack` heads of a group
// that share keys, interleaved (row r is head r % pack of query r / pack).
struct QueryRows {
  const char* base;  // position 0, first head
  int64_t row_bytes, head_bytes;
  int begin;   // position of the tile's row 0
  int length;  // of the sequence
  int pack;
  int rows;  // of the tile that are used

  __device__ const char* operator()(int r) const {
    const int query = begin + (pack == 1 ? r : r / pack);
    if (query < 0 || query >= length || r >= rows) return nullptr;
    return base + query * row_bytes + (pack == 1 ? 0 : r % pack * head_bytes);
  }
};

__device__ inline int element_bytes(int dtype) {
  return dtype == TESSERA_FP32 ? 4 : dtype >= TESSERA_E4M3 ? 1 : 2;
}

__device__ inline QueryRows query_rows(const Params& p, int tensor, const Sequence& sequence,
                                       int head, int begin, int pack, int rows) {
  const View& view = p.tensor[tensor];
  const int bytes = element_bytes(view.dtype);
  const int64_t at = offset_of(view, sequence.q.batch, sequence.q.first, head);
  return {static_cast<const char*>(view.data) + at * bytes,
          view.stride[1] * bytes,
          view.stride[2] * bytes,
          begin,
          sequence.q.length,
          pack,
          rows};
}

// Rows of one head of k or v: positions of a sequence, through the page table if there is one. Keys
// that a key-only mask hides from all `heads` query heads from `head` on do not exist, nor do those
// of pages that the band hides from all queries: neither their entries nor the pages are read.
struct KeyRows {
  const Params* p;
  const char* base;  // position 0, or page 0
  int64_t row_bytes, page_bytes;
  const int* table;  // of this sequence; null: no pages
  int64_t table_stride;
  int num_pages;
  int begin, length;
  int first;            // keys before it do not exist
  const uint8_t* mask;  // key-only mask of this sequence and head; null: none
  int64_t mask_stride, mask_head_stride;
  int mask_heads;
  bool mask_drops;

  __device__ const char* operator()(int r) const {
    const int key = begin + r;
    if (key < first || key >= length || (mask && hidden(key))) return nullptr;
    if (!table) return base + key * row_bytes;
    const int page = clamped(table[key / p->page_size * table_stride], 0, num_pages - 1);
    return base + page * page_bytes + key % p->page_size * row_bytes;
  }

 private:
  __device__ bool hidden(int key) const {
    for (int h = 0; h < mask_heads; ++h) {
      if ((mask[h * mask_head_stride + key * mask_stride] != 0) != mask_drops) return false;
    }
    return true;
  }
};

__device__ inline KeyRows key_rows(const Params& p, int tensor, const Sequence& sequence, int head,
                                   int heads) {
  const View& view = p.tensor[tensor];
  const int bytes = element_bytes(view.dtype);
  const int kv_head = head / p.group;
  KeyRows rows{};
  rows.p = &p;
  rows.row_bytes = view.stride[1] * bytes;
  rows.page_bytes = view.stride[0] * bytes;
  rows.length = sequence.k.length;
  const char* base = static_cast<const char*>(view.data);
  if (p.page_size != 0) {
    const View& table = p.tensor[tensor == TESSERA_K ? TESSERA_PAGE_TABLE_K : TESSERA_PAGE_TABLE_V];
    rows.table = static_cast<const int*>(table.data) + offset_of(table, sequence.n);
    rows.table_stride = table.stride[1];
    rows.num_pages = tensor == TESSERA_K ? p.pages_k : p.pages_v;
    rows.base = base + offset_of(view, 0, 0, kv_head) * bytes;
    const Interval seen = sequence.band.keys();
    rows.first = seen.lo;
    rows.length = rows.num_pages == 0 ? 0 : seen.hi;
  } else {
    rows.base = base + offset_of(view, sequence.k.batch, sequence.k.first, kv_head) * bytes;
  }
  const View& mask = p.tensor[TESSERA_MASK];
  if (mask.data && mask.stride[2] == 0) {
    rows.mask = static_cast<const uint8_t*>(mask.data) +
                offset_of(mask, sequence.n, head, 0,
                          dense_start<SideOfKeys>(p, sequence.n, sequence.k.length));
    rows.mask_stride = mask.stride[3];
    rows.mask_head_stride = mask.stride[1];
    rows.mask_heads = heads;
    rows.mask_drops = (p.flags & TESSERA_MASK_DROP) != 0;
  }
  return rows;
}

// 16 bytes of shared memory from `count` elements of T at source, the rest zeros; kFp8: or of fp8.
template <typename T, bool kFp8>
__device__ inline void copy_elements(T* smem, const char* source, int count, int dtype) {
  constexpr int kElements = 16 / static_cast<int>(sizeof(T));
  if constexpr (kFp8) {
    if (dtype >= TESSERA_E4M3) {
#pragma unroll 1
      for (int i = 0; i < kElements; ++i) smem[i] = i < count ? load_fp8(source, i, dtype) : 0.f;
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    smem[i] = i < count ? reinterpret_cast<const T*>(source)[i] : T(0.f);
  }
}

// The same from eight fp8 elements in 8-byte aligned memory.
template <typename T>
__device__ inline void convert_fp8(T* smem, const char* source, int dtype) {
  const uint2 bytes = *reinterpret_cast<const uint2*>(source);
  const auto kind = dtype == TESSERA_E4M3 ? __NV_E4M3 : __NV_E5M2;
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t pair = (i < 2 ? bytes.x : bytes.y) >> (i % 2 * 16) & 0xFFFF;
    const __half2 halves(__nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(pair), kind));
    const float2 floats = __half22float2(halves);
    words[i] = pack<T>(floats.x, floats.y);
  }
  *reinterpret_cast<uint4*>(smem) = {words[0], words[1], words[2], words[3]};
}

template <typename T>
__device__ inline bool same_type(const View& view) {
  return (view.dtype == TESSERA_FP32) == (sizeof(T) == 4) && view.dtype < TESSERA_E4M3;
}

// tile[r][c] = rows(r)[c] for r < kRows, c < columns; zeros up to kColumns and where rows(r) is
// null. Any alignment; kFp8: of T or of fp8, which is converted on the way. Asynchronous where it
// can be: commit, wait and a barrier are the caller's.
template <typename T, int kRows, int kColumns, int kThreads, bool kFp8 = false, typename RowsOf>
__device__ __forceinline__ void load_tile(T* tile, const RowsOf& rows, int columns,
                                          const View& view, int thread = threadIdx.x) {
  constexpr int kElements = 16 / static_cast<int>(sizeof(T)), kChunks = kColumns / kElements;
  const int bytes = element_bytes(view.dtype);
  const int wide = same_type<T>(view) ? view.vector_bytes : 0;
  const char* anywhere = static_cast<const char*>(view.data);
  // Lanes side by side have a row, which is found once.
  constexpr int kLanes = kChunks <= 8 ? 8 : kChunks <= 16 ? 16 : 32;
#pragma unroll 1
  for (int r = thread / kLanes; r < kRows; r += kThreads / kLanes) {
    const char* row = rows(r);
#pragma unroll 1
    for (int c = thread % kLanes * kElements; c < kColumns; c += kLanes * kElements) {
      T* to = tile + r * kSmemStride<T, kColumns> + c;
      const int count = row ? min(max(columns - c, 0), kElements) : 0;
      const char* from = count ? row + c * bytes : anywhere;
      if (wide == 16) {
        copy_async<16>(to, from, count * bytes);
      } else if (wide >= 4) {
#pragma unroll
        for (int word = 0; word < 4; ++word) {
          const int left = min(max(count * bytes - 4 * word, 0), 4);
          copy_async<4>(reinterpret_cast<char*>(to) + 4 * word, left ? from + 4 * word : anywhere,
                        left);
        }
      } else {
        if constexpr (kFp8) {
          if (bytes == 1 && view.vector_bytes >= 8 && count == kElements) {
            convert_fp8(to, from, view.dtype);
            continue;
          }
        }
        copy_elements<T, kFp8>(to, from, count, view.dtype);
      }
    }
  }
}

// The same from rows at one distance, 16-byte aligned, of T: what the lean kernels meet and the
// rich ones take where they can. Rows [0, valid) exist.
template <typename T, int kRows, int kColumns, int kThreads>
__device__ __forceinline__ void load_tile_fast(T* tile, const char* row0, int64_t row_bytes,
                                               int valid, int columns, int thread = threadIdx.x) {
  constexpr int kElements = 16 / sizeof(T), kChunks = kColumns / kElements;
  static_assert(kThreads % kChunks == 0 && kRows % (kThreads / kChunks) == 0);
  constexpr int kRowsAtOnce = kThreads / kChunks;
  const int r = thread / kChunks, c = thread % kChunks * kElements;
  const int bytes = min(max(columns - c, 0), kElements) * static_cast<int>(sizeof(T));
  const char* from = row0 + r * row_bytes + c * sizeof(T);
  const int64_t step = kRowsAtOnce * row_bytes;
  T* to = tile + r * kSmemStride<T, kColumns> + c;
  const auto copy = [&](int i, bool exists) {
    copy_async<16>(to + i * kSmemStride<T, kColumns>, exists ? from : row0, exists ? bytes : 0);
    from += step;
  };
  if (valid >= kRows) {
#pragma unroll
    for (int i = 0; i < kRows; i += kRowsAtOnce) copy(i, true);
  } else {
#pragma unroll
    for (int i = 0; i < kRows; i += kRowsAtOnce) copy(i, r + i < valid);
  }
}

template <typename T, int kRows, int kColumns, int kThreads>
inline constexpr bool kHasFastLoad = kThreads % (kColumns * sizeof(T) / 16) == 0 &&
                                     kRows % (kThreads / (kColumns * sizeof(T) / 16) +
                                              (kThreads < kColumns * sizeof(T) / 16)) ==
                                         0;

// Rows of k or v from key0 on. Lean kernels are only run where the fast way is open. fp8 is met by
// rich kernels of the forward pass, beside a q of 16 bits.
template <typename T, int kRows, int kColumns, int kThreads, bool kRich, bool kForward = false>
__device__ __forceinline__ void load_keys(T* tile, KeyRows rows, int key0, int columns,
                                          const View& view, int thread = threadIdx.x) {
  if constexpr (kHasFastLoad<T, kRows, kColumns, kThreads>) {
    if (!kRich ||
        (same_type<T>(view) && view.vector_bytes == 16 && !rows.table && !rows.mask && key0 >= 0)) {
      const int valid = min(max(rows.length - key0, 0), kRows);
      load_tile_fast<T, kRows, kColumns, kThreads>(
          tile, valid > 0 ? rows.base + key0 * rows.row_bytes : static_cast<const char*>(view.data),
          rows.row_bytes, valid, columns, thread);
      return;
    }
  }
  if constexpr (kRich || !kHasFastLoad<T, kRows, kColumns, kThreads>) {
    rows.begin = key0;
    constexpr bool kFp8 = kForward && kRich && sizeof(T) == 2;
    load_tile<T, kRows, kColumns, kThreads, kFp8>(tile, rows, columns, view, thread);
  }
}

// Rows [query0, query0 + kRows) of one head of q or do.
template <typename T, int kRows, int kColumns, int kThreads, bool kRich>
__device__ __forceinline__ void load_queries(T* tile, const Params& p, int tensor,
                                             const Sequence& sequence, int head, int query0,
                                             int columns) {
  const View& view = p.tensor[tensor];
  const QueryRows rows = query_rows(p, tensor, sequence, head, query0, 1, kRows);
  if constexpr (kHasFastLoad<T, kRows, kColumns, kThreads>) {
    if (!kRich || (view.vector_bytes == 16 && query0 >= 0)) {
      load_tile_fast<T, kRows, kColumns, kThreads>(tile, rows.base + query0 * rows.row_bytes,
                                                   rows.row_bytes, min(rows.length - query0, kRows),
                                                   columns);
      return;
    }
  }
  if constexpr (kRich || !kHasFastLoad<T, kRows, kColumns, kThreads>) {
    load_tile<T, kRows, kColumns, kThreads>(tile, rows, columns, view);
  }
}

}  // namespace tessera::cuda::sm80
