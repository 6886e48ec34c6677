// SPDX-License-Identifier: Apache-2.0
#include "cpu/cache/rope.h"

#include <algorithm>
#include <cstring>

#include "core/problem/dtype.h"
#include "cpu/simd/kernels.h"

namespace tessera::cpu {
namespace {

constexpr int64_t kPiece = 128;  // pairs that are turned at a time, on the stack

float largest_of(int32_t dtype) { return dtype == TESSERA_E4M3 ? 448.0f : 57344.0f; }

// n elements from element `at` on, as F.
template <typename F>
void load(int32_t dtype, const char* row, int64_t at, int64_t n, F* to) {
  if constexpr (sizeof(F) == 4) {
    std::fill_n(to, n, 0.0f);
    kernels().add_row(dtype, row + at * size_of(dtype), n, 1.0f, to);
  } else {
    for (int64_t i = 0; i < n; ++i) to[i] = load_element(row, at + i, dtype);
  }
}

template <typename F>
void store(const RowMove& move, char* row, int64_t at, int64_t n, const F* from) {
  const int32_t dtype = move.to_dtype;
  if (is_fp8(dtype)) {
    const float largest = largest_of(dtype);
    for (int64_t i = 0; i < n; ++i) {
      const float value = static_cast<float>(from[i]) / move.scale;
      store_element(row, at + i, dtype, std::clamp(value, -largest, largest));  // NaN stays
    }
  } else if constexpr (sizeof(F) == 4) {
    kernels().round_row(dtype, from, n, row + at * size_of(dtype));
  } else {
    for (int64_t i = 0; i < n; ++i) store_element(row, at + i, dtype, from[i]);
  }
}

// A pair (a, b) becomes (a cos - b sin, b cos + a sin).
template <typename F>
void turn(const Angles& angles, int64_t pair, int64_t n, F* a, F* b, int64_t step) {
  const F sign = angles.inverse ? F{-1} : F{1};
  for (int64_t i = 0; i < n; ++i) {
    const F c = angles.cos[pair + i], s = sign * angles.sin[pair + i];
    const F x = a[i * step], y = b[i * step];
    a[i * step] = x * c - y * s;
    b[i * step] = y * c + x * s;
  }
}

template <typename F>
void move_elements(const RowMove& move, const char* from, char* to) {
  const Angles& angles = move.angles;
  F piece[2 * kPiece];
  for (int64_t pair = 0; pair < angles.half; pair += kPiece) {
    const int64_t n = std::min(kPiece, angles.half - pair);
    if (angles.interleaved) {
      load(move.from_dtype, from, 2 * pair, 2 * n, piece);
      turn(angles, pair, n, piece, piece + 1, 2);
      store(move, to, 2 * pair, 2 * n, piece);
    } else {
      load(move.from_dtype, from, pair, n, piece);
      load(move.from_dtype, from, angles.half + pair, n, piece + kPiece);
      turn(angles, pair, n, piece, piece + kPiece, 1);
      store(move, to, pair, n, piece);
      store(move, to, angles.half + pair, n, piece + kPiece);
    }
  }
  for (int64_t at = 2 * angles.half; at < move.d; at += 2 * kPiece) {
    const int64_t n = std::min(2 * kPiece, move.d - at);
    load(move.from_dtype, from, at, n, piece);
    store(move, to, at, n, piece);
  }
}

}  // namespace

void move_row(const RowMove& move, const char* from, char* to) {
  const int64_t size = size_of(move.from_dtype);
  if (move.from_dtype == TESSERA_FP64) return move_elements<double>(move, from, to);
  if (move.from_dtype != move.to_dtype) return move_elements<float>(move, from, to);
  // What passes keeps its bits.
  RowMove turned = move;
  turned.d = 2 * move.angles.half;
  move_elements<float>(turned, from, to);
  std::memmove(to + turned.d * size, from + turned.d * size,
               static_cast<size_t>((move.d - turned.d) * size));
}

}  // namespace tessera::cpu
