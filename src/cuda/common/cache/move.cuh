// SPDX-License-Identifier: Apache-2.0
// What one thread of tessera_rotate and tessera_append does: a piece of one row of one head is
// read, turned by the position of its token, scaled and rounded to another dtype. No thread needs
// another one, so a test runs all of them on the host (tests/cuda/cache_test.cc).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstring>

#include "cuda/common/cache/launch.h"

namespace tessera::cuda {

// A row on its way: from and to are its first elements.
struct MovedRow {
  const char* from;
  char* to;
  int32_t from_dtype, to_dtype, d;
  int32_t half;            // pairs that turn
  const float *cos, *sin;  // of the row's position
  bool interleaved, inverse;
  bool nowhere;  // the position is beyond the tables: NaN
  float scale;
};

// `to` or `from` is an array of the thread's; the other is aligned to kBytes, at most 16.
template <int kBytes>
TESSERA_HOST_DEVICE void copy_bytes(void* to, const void* from) {
  constexpr int kStep = kBytes < 16 ? kBytes : 16;
#pragma unroll
  for (int i = 0; i < kBytes; i += kStep) {
    std::memcpy(__builtin_assume_aligned(static_cast<char*>(to) + i, kStep),
                __builtin_assume_aligned(static_cast<const char*>(from) + i, kStep), kStep);
  }
}

// Elements [at, at + kN) of a row of fp32, bf16 or fp16.
template <int kN>
TESSERA_HOST_DEVICE void load_piece(const char* row, int at, int dtype, float* x) {
  if (dtype == TESSERA_FP32) return copy_bytes<4 * kN>(x, row + 4 * at);
  alignas(16) uint16_t bits[kN];
  copy_bytes<2 * kN>(bits, row + 2 * at);
#pragma unroll
  for (int i = 0; i < kN; ++i) {
    if (dtype == TESSERA_BF16) {
      x[i] = __bfloat162float(__ushort_as_bfloat16(bits[i]));
    } else {
      x[i] = __half2float(__ushort_as_half(bits[i]));
    }
  }
}

// The same elements of fp8 too: the quotient by scale, saturated.
template <int kN>
TESSERA_HOST_DEVICE void store_piece(char* row, int at, int dtype, const float* x, float scale) {
  if (dtype == TESSERA_FP32) return copy_bytes<4 * kN>(row + 4 * at, x);
  if (dtype == TESSERA_BF16 || dtype == TESSERA_FP16) {
    alignas(16) uint16_t bits[kN];
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      bits[i] = dtype == TESSERA_BF16 ? __bfloat16_as_ushort(__float2bfloat16_rn(x[i]))
                                      : __half_as_ushort(__float2half_rn(x[i]));
    }
    return copy_bytes<2 * kN>(row + 2 * at, bits);
  }
  const auto format = dtype == TESSERA_E4M3 ? __NV_E4M3 : __NV_E5M2;
  alignas(16) uint8_t bits[kN];
#pragma unroll
  for (int i = 0; i < kN; ++i) {
    bits[i] = __nv_cvt_float_to_fp8(x[i] / scale, __NV_SATFINITE, format);
  }
  copy_bytes<kN>(row + at, bits);
}

// Elements [at, at + kN) that do not turn; of one dtype they keep their bits.
template <int kN>
TESSERA_HOST_DEVICE void pass_piece(const MovedRow& row, int at) {
  alignas(16) float x[kN];
  if (row.from_dtype == row.to_dtype && !row.nowhere) {
    const int size = row.from_dtype == TESSERA_FP32 ? 4 : 2;
    const char* from = row.from + at * size;
    char* to = row.to + at * size;
    size == 4 ? copy_bytes<4 * kN>(x, from) : copy_bytes<2 * kN>(x, from);
    size == 4 ? copy_bytes<4 * kN>(to, x) : copy_bytes<2 * kN>(to, x);
    return;
  }
  load_piece<kN>(row.from, at, row.from_dtype, x);
#pragma unroll
  for (float& value : x) value = row.nowhere ? __builtin_nanf("") : value;
  store_piece<kN>(row.to, at, row.to_dtype, x, row.scale);
}

// (a, b) becomes (a cos - b sin, b cos + a sin).
TESSERA_HOST_DEVICE void turn(float& a, float& b, float cos, float sin) {
  const float x = a, y = b;
  a = x * cos - y * sin;
  b = y * cos + x * sin;
}

// Pairs [pair, pair + kN), which stand in two runs of kN elements.
template <int kN>
TESSERA_HOST_DEVICE void turn_piece(const MovedRow& row, int pair) {
  const int first = row.interleaved ? 2 * pair : pair;
  const int second = row.interleaved ? first + kN : row.half + pair;
  alignas(16) float x[2 * kN], cos[kN], sin[kN];
  load_piece<kN>(row.from, first, row.from_dtype, x);
  load_piece<kN>(row.from, second, row.from_dtype, x + kN);
#pragma unroll
  for (int i = 0; i < kN; ++i) cos[i] = sin[i] = __builtin_nanf("");
  if (!row.nowhere) {
    copy_bytes<4 * kN>(cos, row.cos + pair);
    copy_bytes<4 * kN>(sin, row.sin + pair);
  }
#pragma unroll
  for (int i = 0; i < kN; ++i) sin[i] = row.inverse ? -sin[i] : sin[i];
  if (row.interleaved) {
#pragma unroll
    for (int i = 0; i < kN; ++i) turn(x[2 * i], x[2 * i + 1], cos[i], sin[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kN; ++i) turn(x[i], x[kN + i], cos[i], sin[i]);
  }
  store_piece<kN>(row.to, first, row.to_dtype, x, row.scale);
  store_piece<kN>(row.to, second, row.to_dtype, x + kN, row.scale);
}

// A row is half / kN pieces that turn, then pieces of 2 kN elements that pass.
template <int kN>
TESSERA_HOST_DEVICE void move_piece(const MovedRow& row, int piece) {
  const int turning = row.half / kN;
  if (piece < turning) return turn_piece<kN>(row, piece * kN);
  const int at = 2 * row.half + (piece - turning) * 2 * kN;
  if (at < row.d) pass_piece<kN>(row, at);
  if (at + kN < row.d) pass_piece<kN>(row, at + kN);
}

// ---- where a token stands ----

TESSERA_HOST_DEVICE int64_t table_value(const View& view, int64_t i, int64_t j = 0) {
  const int64_t at = i * view.stride[0] + j * view.stride[1];
  return view.dtype == TESSERA_INT32 ? static_cast<const int32_t*>(view.data)[at]
                                     : static_cast<const int64_t*>(view.data)[at];
}

// Token i of sequence n, which stands in rows (batch, row) of k, v, q and x.
struct Token {
  int64_t n, i, batch, row;
  bool exists;  // a packed buffer may have rows of nobody
  bool counts;  // a padded one rows that are not new
};

TESSERA_HOST_DEVICE Token token_of(const MoveLaunch& m, int64_t t) {
  if (!m.cu_seqlens.data) {
    const int64_t n = t / m.sequence, i = t % m.sequence;
    return {n, i, n, i, true, !m.seqlens_q.data || i < table_value(m.seqlens_q, n)};
  }
  int64_t n = 0, end = m.batch;  // the last sequence that begins at t or before: empty ones share
  while (end - n > 1) {
    const int64_t middle = (n + end) / 2;
    (table_value(m.cu_seqlens, middle) <= t ? n : end) = middle;
  }
  const int64_t i = t - table_value(m.cu_seqlens, n);
  const bool exists = m.batch > 0 && i >= 0 && t < table_value(m.cu_seqlens, n + 1);
  return {n, i, 0, t, exists, true};
}

// -1 if the token's place in the tables is wrong.
TESSERA_HOST_DEVICE int64_t position_of(const MoveLaunch& m, const Token& token) {
  if (!m.positions.data) return token.i;
  if (m.position_each) return table_value(m.positions, token.n, token.i);
  const int64_t start = table_value(m.positions, token.n);
  return start < 0 || start > INT64_MAX - token.i ? -1 : start + token.i;
}

TESSERA_HOST_DEVICE int64_t offset_in(const View& v, int64_t batch, int64_t row, int64_t head,
                                      int size) {
  return (batch * v.stride[0] + row * v.stride[1] + head * v.stride[2]) * size;
}

TESSERA_HOST_DEVICE int size_of_element(int dtype) {
  return dtype == TESSERA_FP32 ? 4 : dtype == TESSERA_BF16 || dtype == TESSERA_FP16 ? 2 : 1;
}

// Where position p of sequence n lies in a cache; null if it has no place.
TESSERA_HOST_DEVICE char* place_in_cache(const MoveLaunch& m, const View& cache, int64_t n,
                                         int64_t p, int head) {
  if (p < 0 || p >= m.capacity) return nullptr;
  int64_t batch = n, row = p;
  if (m.page_table.data) {
    batch = table_value(m.page_table, n, p / m.page_size);
    row = p % m.page_size;
    if (batch < 0 || batch >= m.pages) return nullptr;
  }
  return static_cast<char*>(cache.data) +
         offset_in(cache, batch, row, head, size_of_element(cache.dtype));
}

// ---- one thread ----

// Piece `unit % pieces` of head `unit / pieces` of token t, heads counted over all tensors.
template <int kN>
TESSERA_HOST_DEVICE void move_unit(const MoveLaunch& m, const Token& token, int unit) {
  const int piece = unit % m.pieces;
  int head = unit / m.pieces, which = 0;
  while (head >= m.moved[which].heads) head -= m.moved[which++].heads;
  const Moved& moved = m.moved[which];
  const int64_t position = position_of(m, token);
  MovedRow row{};
  row.from_dtype = moved.from.dtype;
  row.to_dtype = moved.to.dtype;
  row.d = moved.d;
  row.from = static_cast<const char*>(moved.from.data) +
             offset_in(moved.from, token.batch, token.row, head, size_of_element(row.from_dtype));
  if (moved.to_cache) {
    row.to = token.counts ? place_in_cache(m, moved.to, token.n, position, head) : nullptr;
    if (!row.to) return;
  } else {
    row.to = static_cast<char*>(moved.to.data) +
             offset_in(moved.to, token.batch, token.row, head, size_of_element(row.to_dtype));
  }
  if (!token.counts) {  // zeros, of any 16-bit or 32-bit dtype
    const int size = size_of_element(row.to_dtype), first = piece * 2 * kN;
    for (int i = first; i < first + 2 * kN && i < row.d; ++i) {
      for (int b = 0; b < size; ++b) row.to[i * size + b] = 0;
    }
    return;
  }
  if (moved.turns) {
    row.half = m.half;
    row.interleaved = m.interleaved;
    row.inverse = m.inverse;
    row.nowhere = position < 0 || position >= m.max_position;
    row.cos = m.cos + position * m.cos_stride;
    row.sin = m.sin + position * m.sin_stride;
  }
  row.scale = 1;
  if (moved.scale.data) {
    row.scale = static_cast<const float*>(
        moved.scale.data)[token.n * moved.scale.stride[0] + head * moved.scale.stride[1]];
  }
  move_piece<kN>(row, piece);
}

}  // namespace tessera::cuda
