// SPDX-License-Identifier: Apache-2.0
// Jobs on packed tokens that several ranks share, and copies between layouts. A rank of
// context parallelism holds two chunks of equal length of every sequence, its first and its second
// half; cu_seqlens are of the rank's own tokens, or of the whole where ranks are told apart.
#pragma once

#include <cstring>

#include "nvte/jobs.h"

namespace tessera::nvte {

TESSERA_EVERYWHERE inline void clear_piece(char* to, int64_t bytes) {
  const Sixteen zeros{};
  move_piece(to, reinterpret_cast<const char*>(&zeros), bytes);
}

// b sequences, whose boundaries are cu_seqlens divided by some number: what a half or a rank holds.
struct Sequences {
  Integers cu_seqlens;
  int64_t b;

  TESSERA_EVERYWHERE int64_t start(int64_t n, int64_t divisor = 1) const {
    return cu_seqlens[n] / divisor;
  }
  TESSERA_EVERYWHERE int64_t half(int64_t n) const { return cu_seqlens.length(n) / 2; }
  // The sequence that holds token `at` of the boundaries divided; b: none does.
  TESSERA_EVERYWHERE int64_t of(int64_t at, int64_t divisor = 1) const {
    int64_t first = 0, last = b;  // the first that ends behind `at`
    while (first < last) {
      const int64_t middle = (first + last) / 2;
      if (start(middle + 1, divisor) > at) {
        last = middle;
      } else {
        first = middle + 1;
      }
    }
    return first < b && start(first, divisor) > at ? b : first;
  }
};

// Row `to` of the output from row `from` of the input.
struct Move {
  int64_t to, from;
};

// ---- maps: count() moves, each of which operator() tells; -1 where there is none ----

// The tokens of first or second halves from those of whole sequences.
struct HalfMap {
  Sequences sequences;
  int64_t tokens;  // of the halves
  bool second;

  TESSERA_EVERYWHERE int64_t count() const { return tokens; }
  TESSERA_EVERYWHERE Move operator()(int64_t row) const {
    const int64_t n = sequences.of(row, 2);
    if (n == sequences.b) return {-1, -1};
    const int64_t from = sequences.start(n) + row - sequences.start(n, 2);
    return {row, second ? from + sequences.half(n) : from};
  }
};

// Tokens of sequences, not those between them.
struct ValidMap {
  Sequences places;  // padded
  Integers cu_seqlens;
  int64_t tokens;

  TESSERA_EVERYWHERE int64_t count() const { return tokens; }
  TESSERA_EVERYWHERE Move operator()(int64_t row) const {
    const int64_t n = places.of(row);
    if (n == places.b || row - places.start(n) >= cu_seqlens.length(n)) return {-1, -1};
    return {row, row};
  }
};

// Whole sequences to or from the order of ranks: rank 0's two chunks of each sequence, rank 1's, ...
// Rank k has chunks k and 2 ranks - 1 - k of 2 ranks.
struct RankMap {
  Sequences sequences;
  int64_t tokens, ranks;  // tokens of all ranks
  bool to_ranks;

  // Where token `at` of a rank lies in the whole; -1: nowhere.
  TESSERA_EVERYWHERE int64_t place(int64_t rank, int64_t at) const {
    const int64_t n = sequences.of(at, ranks);
    if (n == sequences.b) return -1;
    const int64_t chunk = sequences.cu_seqlens.length(n) / (2 * ranks),
                  i = at - sequences.start(n, ranks);
    const int64_t within = i < chunk ? rank * chunk + i : (2 * ranks - 2 - rank) * chunk + i;
    return sequences.start(n) + within;
  }
  TESSERA_EVERYWHERE int64_t count() const { return tokens; }
  TESSERA_EVERYWHERE Move operator()(int64_t row) const {
    const int64_t per_rank = tokens / ranks, whole = place(row / per_rank, row % per_rank);
    if (whole < 0) return {-1, -1};
    return to_ranks ? Move{row, whole} : Move{whole, row};
  }
};

// ---- jobs ----

// Rows as a map says, of each of `parts` tensors that lie one behind the other.
template <typename Map>
struct MoveJob {
  const char* from;
  char* to;
  Rows rows;
  int64_t parts, from_tokens, to_tokens;
  Map map;

  TESSERA_EVERYWHERE int64_t count() const { return parts * map.count() * rows.pieces(); }
  TESSERA_EVERYWHERE void operator()(int64_t index) const {
    const int64_t piece = index % rows.pieces(), rest = index / rows.pieces();
    const int64_t part = rest / map.count();
    const Move move = map(rest % map.count());
    if (move.to < 0 || move.to >= to_tokens || move.from < 0 || move.from >= from_tokens) return;
    rows.move(to, part * to_tokens + move.to, from, part * from_tokens + move.from, piece);
  }
};

// index[i] = the place in the whole of the rank's token i.
struct PlacesJob {
  RankMap map;
  int32_t* index;
  int64_t rank;

  TESSERA_EVERYWHERE int64_t count() const { return map.tokens / map.ranks; }
  TESSERA_EVERYWHERE void operator()(int64_t i) const {
    const int64_t place = map.place(rank, i);
    if (place >= 0) index[i] = static_cast<int32_t>(place);
  }
};

// log-sum-exps [h, tokens], or of sequences apart [b, h, extent].
struct Lse {
  float* data;
  int64_t heads, extent;
  bool packed;

  // The place of token i of sequence n, which begins at `start` where sequences are packed.
  TESSERA_EVERYWHERE float* at(int64_t n, int64_t head, int64_t start, int64_t i) const {
    const int64_t row = packed ? head : n * heads + head, column = packed ? start + i : i;
    return column < extent ? data + row * extent + column : nullptr;
  }
};

TESSERA_EVERYWHERE inline bool is_minus_infinity(float x) { return x < -3.4028235e38f; }

// exp(part - total); what saw no key has none.
TESSERA_EVERYWHERE inline float weight(float part, float total) {
  return is_minus_infinity(part) ? 0.0f : expf(part - total);
}

// Reads the second halves of lse into step, or joins step with them.
struct SecondHalfLseJob {
  Lse lse, step;
  Sequences sequences;
  bool read;

  // Tokens that step has room for.
  TESSERA_EVERYWHERE int64_t slots() const {
    return step.packed ? step.extent : sequences.b * step.extent;
  }
  TESSERA_EVERYWHERE int64_t count() const { return step.heads * slots(); }
  TESSERA_EVERYWHERE void operator()(int64_t index) const {
    const int64_t head = index / slots(), slot = index % slots();
    const int64_t n = step.packed ? sequences.of(slot, 2) : slot / step.extent;
    if (n == sequences.b) return;
    const int64_t start = sequences.start(n, 2),
                  i = step.packed ? slot - start : slot % step.extent;
    if (i >= sequences.half(n)) return;
    float* const part = step.at(n, head, start, i);
    float* const whole = lse.at(n, head, sequences.start(n), sequences.half(n) + i);
    if (!part || !whole) return;
    if (read) {
      *part = *whole;
    } else {
      const float most = *part > *whole ? *part : *whole, least = *part > *whole ? *whole : *part;
      *whole = is_minus_infinity(least) ? most : most + log1pf(expf(least - most));
    }
  }
};

// fp32, bf16 or fp16 numbers.
enum class Kind { kFloat, kBFloat16, kHalf };

TESSERA_EVERYWHERE inline float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
TESSERA_EVERYWHERE inline uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}
TESSERA_EVERYWHERE inline float float_of_half(uint32_t half) {
  const uint32_t sign = (half & 0x8000u) << 16, exponent = half >> 10 & 31, rest = half & 0x3ffu;
  if (exponent == 31) return float_of(sign | 0x7f800000u | rest << 13);
  if (exponent > 0) return float_of(sign | (exponent + 112) << 23 | rest << 13);
  const float small = static_cast<float>(rest) * 5.9604644775390625e-8f;  // 2^-24
  return sign ? -small : small;
}
// To the nearest, ties to even.
TESSERA_EVERYWHERE inline uint16_t half_of(float value) {
  const uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
  uint32_t half;
  if (size > 0x7f800000u) {
    half = 0x7e00u;
  } else if (size >= 0x477ff000u) {  // 65520
    half = 0x7c00u;
  } else if (size < 0x38800000u) {  // 2^-14
    half = static_cast<uint32_t>(rintf(float_of(size) * 16777216.0f));
  } else {
    half = (size - 0x38000000u + 0xfffu + (size >> 13 & 1)) >> 13;
  }
  return static_cast<uint16_t>(sign | half);
}
TESSERA_EVERYWHERE inline uint16_t bfloat16_of(float value) {
  const uint32_t bits = bits_of(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

struct Numbers {
  void* data;
  Kind kind;

  TESSERA_EVERYWHERE float get(int64_t i) const {
    if (kind == Kind::kFloat) return static_cast<const float*>(data)[i];
    const uint32_t bits = static_cast<const uint16_t*>(data)[i];
    return kind == Kind::kHalf ? float_of_half(bits) : float_of(bits << 16);
  }
  TESSERA_EVERYWHERE void set(int64_t i, float value) const {
    if (kind == Kind::kFloat) {
      static_cast<float*>(data)[i] = value;
    } else {
      static_cast<uint16_t*>(data)[i] = kind == Kind::kHalf ? half_of(value) : bfloat16_of(value);
    }
  }
};

// x times its weight; what has none may be anything.
TESSERA_EVERYWHERE inline float weighted(float x, float weight) {
  return weight > 0 || weight != weight ? x * weight : 0.0f;
}

// Joins a step with out: out exp(old - total) + step exp(part - total), of lses of the same tokens.
struct OutJob {
  Numbers out, step;
  Lse old, total, part;
  Sequences sequences;
  int64_t tokens, step_tokens, heads, d;
  bool second;  // the step has second halves alone

  TESSERA_EVERYWHERE int64_t count() const { return step_tokens * heads * d; }
  TESSERA_EVERYWHERE void operator()(int64_t index) const {
    const int64_t row = index / (heads * d), element = index % (heads * d), head = element / d;
    const int64_t divisor = second ? 2 : 1, n = sequences.of(row, divisor);
    if (n == sequences.b) return;
    const int64_t start = sequences.start(n), i = row - sequences.start(n, divisor);
    const int64_t whole = second ? i + sequences.half(n) : i;
    const float *before = old.at(n, head, start, whole), *after = total.at(n, head, start, whole),
                *now = part.at(n, head, sequences.start(n, divisor), i);
    if (start + whole >= tokens || !before || !after || !now) return;
    const int64_t at = (start + whole) * heads * d + element;
    out.set(at, weighted(out.get(at), weight(*before, *after)) +
                    weighted(step.get(index), weight(*now, *after)));
  }
};

enum class GradWord { kNone, kAdd, kCopy, kZero };

// What happens to the two halves of each sequence's gradient. The step has the tokens of both, or
// of the one half that is added or copied.
struct GradJob {
  char* grad;
  const char* step;
  Kind kind;              // of what is added
  int64_t element_bytes;  // 1, 2 or 4
  Sequences sequences;
  int64_t parts, tokens, step_tokens, width;
  GradWord first, second;
  bool step_is_half;

  TESSERA_EVERYWHERE int64_t count() const { return parts * tokens * width; }
  TESSERA_EVERYWHERE void operator()(int64_t index) const {
    const int64_t part = index / (tokens * width), row = index / width % tokens;
    const int64_t n = sequences.of(row);
    if (n == sequences.b) return;
    const int64_t i = row - sequences.start(n), half = sequences.half(n);
    const GradWord word = i < half ? first : second;
    if (word == GradWord::kNone) return;
    char* const to = grad + index * element_bytes;
    if (word == GradWord::kZero) return clear_piece(to, element_bytes);
    const int64_t row_of_step =
        step_is_half ? sequences.start(n, 2) + (i < half ? i : i - half) : row;
    if (row_of_step >= step_tokens) return;
    const int64_t at = (part * step_tokens + row_of_step) * width + index % width;
    if (word == GradWord::kCopy) {
      move_piece(to, step + at * element_bytes, element_bytes);
    } else {
      const Numbers sums{grad, kind}, added{const_cast<char*>(step), kind};
      sums.set(index, sums.get(index) + added.get(at));
    }
  }
};

// A copy in four axes; strides are in pieces. Behind `filled` of the last axis there are zeros.
struct CopyJob {
  const char* from;
  char* to;
  int64_t piece_bytes, filled;
  int64_t extent[4], from_stride[3], to_stride[3];

  TESSERA_EVERYWHERE int64_t count() const { return extent[0] * extent[1] * extent[2] * extent[3]; }
  TESSERA_EVERYWHERE void operator()(int64_t index) const {
    const int64_t last = index % extent[3];
    int64_t rest = index / extent[3], source = last, target = last;
    for (int axis = 2; axis >= 0; --axis) {
      source += rest % extent[axis] * from_stride[axis];
      target += rest % extent[axis] * to_stride[axis];
      rest /= extent[axis];
    }
    if (last < filled) {
      move_piece(to + target * piece_bytes, from + source * piece_bytes, piece_bytes);
    } else {
      clear_piece(to + target * piece_bytes, piece_bytes);
    }
  }
};

}  // namespace tessera::nvte
