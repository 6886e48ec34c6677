// SPDX-License-Identifier: Apache-2.0
// Operands of the forward's register tiles: Q^T strips and prepared blocks of K and V.
//
// A block is a table of row pointers. They lead to the caller's memory where the dtype can be
// multiplied as it is, and to scratch where it was converted (fp16, fp8, and bf16 without native
// products, to fp32; V in bf16, to pairs of keys). Rows that no query of the sequence sees, and
// those that fill the last register tile, lead to a row of zeros: what lies in them is never read.
#pragma once

#include "cpu/forward/args.h"
#include "cpu/forward/tile.h"
#include "cpu/score/score.h"
#include "cpu/simd/products.h"

namespace tessera::cpu {
namespace {

TESSERA_INLINE int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// n elements of a row as fp32, times scale; the rest up to a whole vector is 0.
template <typename S, typename T>
TESSERA_INLINE void convert_row_of(const T* from, int64_t n, float scale, float* to) {
  const auto factor = S::set1(scale);
  int64_t d = 0;
  for (; d + S::kLanes <= n; d += S::kLanes) S::store(to + d, S::mul(S::load(from + d), factor));
  if (d < n) S::store(to + d, S::mul(S::load_n(from + d, static_cast<int>(n - d)), factor));
}
// f(T{}) with the storage type of dtype.
template <typename F>
TESSERA_INLINE void by_dtype(int32_t dtype, F f) {
  switch (dtype) {
    case TESSERA_FP32:
      return f(float{});
    case TESSERA_BF16:
      return f(Bf16{});
    case TESSERA_FP16:
      return f(Fp16{});
    case TESSERA_E4M3:
      return f(E4m3{});
    default:
      return f(E5m2{});
  }
}

template <typename S>
void convert_row(const char* from, int32_t dtype, int64_t n, float scale, float* to) {
  by_dtype(dtype, [&](auto element) {
    convert_row_of<S>(reinterpret_cast<const decltype(element)*>(from), n, scale, to);
  });
}

// What the elements of an fp8 tensor are multiplied by.
TESSERA_INLINE float scale_of(const Strided& scale, const CallSequence& sequence, int64_t kv_head) {
  float factor = 1.0f;
  if (scale.data) memcpy(&factor, at(scale, sequence.n, kv_head), sizeof factor);
  return factor;
}

// Finds where n keys of one head lie, from `begin` on.
TESSERA_INLINE void find_rows(const Rows& rows, const Pages& pages, const CallSequence& sequence,
                              int64_t head, int64_t begin, int64_t n, const char** table) {
  const char* base = rows.data + head * rows.head;
  if (!pages.table) {
    base += sequence.batch_k * rows.batch + (sequence.first_k + begin) * rows.row;
    for (int64_t j = 0; j < n; ++j) table[j] = base + j * rows.row;
    return;
  }
  const char* slots = pages.table + sequence.n * pages.stride[0];
  int64_t slot = begin / pages.page_size, place = begin % pages.page_size;
  for (int64_t j = 0; j < n; ++slot, place = 0) {
    const int64_t page = load_int32(slots + slot * pages.stride[1]);
    const char* row = base + page * rows.batch + place * rows.row;
    const int64_t last = smaller(j + pages.page_size - place, n);
    for (; j < last; ++j, row += rows.row) table[j] = row;
  }
}

// One of the kv heads whose turns at a block follow each other.
struct Turn {
  int64_t first_head;
  int index, heads;
  int64_t head() const { return first_head + index; }
};

template <typename S>
struct Block {
  static constexpr int kBlock = Tile<S>::kBlock;
  static constexpr int kTable = kBlock + 8;  // a register tile may begin at any multiple of 8

  // Where the keys [begin, end) of the block at n0 lie in the first of the heads that take turns:
  // found once for all of them, when the block before it is at work. Others are hidden.
  struct Found {
    int64_t n0;  // -1: nothing
    int begin, end;
    const char* k[kBlock];
    const char* v[kBlock];
  };

  Keys<S> keys;
  Found found[2];  // this block and the next, by turns
  int current;
  const char* k_rows[kTable];
  const char* v_rows[kTable];
  // The next block, to ask for in time; a row of this one if there is none. Each of several kv
  // heads asks for every so many-th key of all, which stand beside each other in rows of k_bytes.
  const char* next_k_rows[kTable];
  const char* next_v_rows[kTable];
  int next_rows;
  int64_t k_bytes, v_bytes;
  // Scratch, as the shape asks for: rows of k_stride and v_stride elements.
  const char* zeros;
  float* k;
  float* v;
  uint32_t* v_pairs;
  int64_t k_stride, v_stride;
  Matrix<uint32_t> k_tiles, v_tiles;  // with matrix tiles: K, and V^T, in pairs; see matrix.h

  void begin_walk() { found[0].n0 = found[1].n0 = -1, current = 0; }
  void find(const Call& call, const CallSequence& sequence, int64_t head, int64_t n0, Found& to);
  void point_at_rows(const Call& call, const CallSequence& sequence, Turn turn);
  void point_ahead(const Call& call, const CallSequence& sequence, Turn turn);
  Ahead k_ahead() const { return {next_k_rows, next_rows, k_bytes}; }
  Ahead v_ahead() const { return {next_v_rows, next_rows, v_bytes}; }
  void prefetch_part(int64_t begin, int64_t whole, int64_t length) const;
  void forget_hidden_keys(const Call& call, const CallSequence& sequence, int64_t head,
                          int64_t heads);
  void convert(const Call& call, const CallSequence& sequence, const ForwardShape& shape,
               int64_t kv_head, int strips);
};

template <typename S>
void Block<S>::find(const Call& call, const CallSequence& sequence, int64_t head, int64_t n0,
                    Found& to) {
  if (to.n0 == n0) return;
  const Interval seen = sequence.band.keys();
  const int64_t begin = larger<int64_t>(seen.lo - n0, 0);
  const int64_t end = larger(smaller<int64_t>(seen.hi - n0, kBlock), begin);
  to.n0 = n0, to.begin = static_cast<int>(begin), to.end = static_cast<int>(end);
  if (begin == end) return;
  find_rows(call.k, call.k_pages, sequence, head, n0 + begin, end - begin, to.k + begin);
  find_rows(call.v, call.v_pages, sequence, head, n0 + begin, end - begin, to.v + begin);
}

template <typename S>
void Block<S>::point_at_rows(const Call& call, const CallSequence& sequence, Turn turn) {
  if (found[current].n0 != keys.n0) current ^= 1;
  Found& here = found[current];
  find(call, sequence, turn.first_head, keys.n0, here);
  const int64_t k_shift = turn.index * call.k.head, v_shift = turn.index * call.v.head;
  for (int j = 0; j < here.begin && j < kTable; ++j) k_rows[j] = v_rows[j] = zeros;
  for (int j = here.begin; j < here.end; ++j) {
    k_rows[j] = here.k[j] + k_shift, v_rows[j] = here.v[j] + v_shift;
  }
  for (int j = here.end; j < kTable; ++j) k_rows[j] = v_rows[j] = zeros;
}

template <typename S>
void Block<S>::point_ahead(const Call& call, const CallSequence& sequence, Turn turn) {
  const auto size = [](int32_t dtype) {
    return dtype == TESSERA_FP32 ? 4 : dtype == TESSERA_BF16 || dtype == TESSERA_FP16 ? 2 : 1;
  };
  k_bytes = turn.heads * call.dqk * size(call.k.dtype);
  v_bytes = turn.heads * call.dv * size(call.v.dtype);
  Found& next = found[current ^ 1];
  find(call, sequence, turn.first_head, keys.n0 + kBlock, next);
  next_rows = 0;
  for (int j = next.begin + turn.index; j < next.end; j += turn.heads) {
    next_k_rows[next_rows] = next.k[j], next_v_rows[next_rows++] = next.v[j];
  }
  if (next_rows == 0) next_rows = 1, next_k_rows[0] = k_rows[0], next_v_rows[0] = v_rows[0];
}

// Tiles of many strips ask for the next block between their products: [begin, begin + length) of
// `whole` equal parts of it at a time.
template <typename S>
void Block<S>::prefetch_part(int64_t begin, int64_t whole, int64_t length) const {
  const int64_t end = smaller(next_rows * (begin + length) / whole, int64_t{next_rows});
  for (int64_t j = next_rows * begin / whole; j < end; ++j) {
    for (int64_t b = 0; b < k_bytes; b += 64) prefetch(next_k_rows[j] + b);
    for (int64_t b = 0; b < v_bytes; b += 64) prefetch(next_v_rows[j] + b);
  }
}

// A mask of keys alone may hide padding, whose contents are nobody's business: 0 x NaN is NaN.
template <typename S>
void Block<S>::forget_hidden_keys(const Call& call, const CallSequence& sequence, int64_t head,
                                  int64_t heads) {
  for (int word = 0; word * 32 < keys.count; ++word) {
    const int n = smaller(keys.count - word * 32, 32);
    uint32_t seen = 0;
    for (int64_t h = head; h < head + heads; ++h) {
      const char* row = at(call.mask, sequence.n, h, 0, sequence.dense_k);
      const auto* bytes = reinterpret_cast<const uint8_t*>(row);
      const uint32_t bits = call.mask.stride[3] ? S::nonzero_bytes(bytes + keys.n0 + word * 32, n)
                                                : (*bytes ? ~uint32_t{0} : 0);
      seen |= call.mask_hides ? ~bits : bits;
    }
    for (int j = 0; j < n; ++j) {
      if ((seen >> j & 1) == 0) k_rows[word * 32 + j] = v_rows[word * 32 + j] = zeros;
    }
  }
}

template <typename S>
void Block<S>::convert(const Call& call, const CallSequence& sequence, const ForwardShape& shape,
                       int64_t kv_head, int strips) {
  const auto convert_rows = [&](const Rows& rows, const Strided& scale, int64_t head_dim,
                                int64_t stride, float* to, const char** table) {
    const float factor = scale_of(scale, sequence, kv_head);
    for (int j = 0; j < keys.count; ++j) {
      if (table[j] == zeros) continue;
      convert_row<typename S::Wide>(table[j], rows.dtype, head_dim, factor, to + j * stride);
      table[j] = reinterpret_cast<const char*>(to + j * stride);
    }
  };
  const bool spreads = strips >= kSpreadStrips;
  if (shape.convert_k || (shape.spread_k && spreads)) {
    convert_rows(call.k, call.k_scale, call.dqk, k_stride, k, k_rows);
  }
  if ((shape.convert_v && !shape.bf16) || (shape.spread_v && spreads)) {
    convert_rows(call.v, call.v_scale, call.dv, v_stride, v, v_rows);
  }
  if constexpr (S::kHasBf16Dot && !S::kNarrow && !S::kHasTiles) {
    if (!shape.bf16) return;
    using W = typename S::Wide;
    constexpr int L = W::kLanes;
    for (int j = 0; j < keys.count; j += 2) {
      const auto* even = reinterpret_cast<const Bf16*>(v_rows[j]);
      const auto* odd = reinterpret_cast<const Bf16*>(v_rows[j + 1]);
      uint32_t* to = v_pairs + j / 2 * v_stride;
      int64_t d = 0;
      for (; d + L <= call.dv; d += L) {
        W::store_pairs(to + d, W::interleave_rows(even + d, odd + d));
      }
      if (d < call.dv) {
        const int n = static_cast<int>(call.dv - d);
        W::store_pairs(to + d, W::interleave_rows_n(even + d, odd + d, n));
      }
    }
  }
}

// Words [d, d + n) of kLanes rows, transposed: word k of lane l is that of row l.
template <typename S, int N, typename Load>
TESSERA_INLINE void pack_words(int64_t words, float* q_t, Load load) {
  constexpr int L = S::kLanes;
  for (int64_t d = 0; d < words; d += L) {
    const int n = static_cast<int>(smaller<int64_t>(words - d, L));
    typename S::F x[L];
    TESSERA_UNROLL
    for (int l = 0; l < L; ++l) x[l] = load(l, d, n);
    S::transpose(x);
    if (n == L) {
      TESSERA_UNROLL
      for (int k = 0; k < L; ++k) S::store(q_t + (d + k) * N * L, x[k]);
    } else {
      for (int k = 0; k < n; ++k) S::store(q_t + (d + k) * N * L, x[k]);
    }
  }
}

// Q^T of a strip: [dqk][lanes] fp32, or [ceil(dqk / 2)][lanes] words of two bf16.
template <typename S, int N>
__attribute__((noinline)) void pack_queries(const Call& call, const CallSequence& sequence,
                                            const StripRows<S>& rows, bool bf16, float* q_t) {
  constexpr int L = S::kLanes;
  for (int v = 0; v < N; ++v) {
    const char* row[L];
    for (int l = 0; l < L; ++l) {
      const int lane = v * L + l;
      row[l] = call.q.data + sequence.batch_q * call.q.batch +
               (sequence.first_q + rows.token[lane]) * call.q.row + rows.head[lane] * call.q.head;
    }
    if constexpr (S::kHasBf16Dot && !S::kNarrow) {
      if (bf16) {
        pack_words<S, N>((call.dqk + 1) / 2, q_t + v * L, [&](int l, int64_t d, int) {
          const int n = static_cast<int>(smaller<int64_t>(call.dqk - 2 * d, 2 * L));
          return S::as_float(S::load_row_n(reinterpret_cast<const Bf16*>(row[l]) + 2 * d, n));
        });
        continue;
      }
    }
    const auto pack = [&](auto element) {
      using T = decltype(element);
      pack_words<S, N>(call.dqk, q_t + v * L, [&](int l, int64_t d, int n) {
        return S::load_n(reinterpret_cast<const T*>(row[l]) + d, n);
      });
    };
    switch (call.q.dtype) {
      case TESSERA_FP32:
        pack(float{});
        break;
      case TESSERA_BF16:
        pack(Bf16{});
        break;
      default:
        pack(Fp16{});
    }
  }
}

}  // namespace
}  // namespace tessera::cpu
