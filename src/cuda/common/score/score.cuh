// SPDX-License-Identifier: Apache-2.0
// The score pipeline, from q.k to the exponent: scale, bias, softcap, ALiBi and every mask, written
// once over fragment coordinates.
//
// A fragment is what a warp holds of a product of 16 x N: thread `lane` has N/2 values, and value e
// is
//     major(e) = lane / 4     + 8 * (e / 2 % 2)            one of two rows, 8 apart
//     minor(e) = lane % 4 * 2 + 8 * (e / 4) + e % 2        pairs of neighbours in every 8 columns
// This is the accumulator of N/8 mma.m16n8 and, seen by one warp, the accumulator of wgmma. The
// forward pass has queries as majors and keys as minors (S); the pass over keys has them swapped
// (S^T).
//
//     x = scale (s + pre) -> softcap tanh(x / softcap) -> + post - slope |i + shift - j|
//     x = -inf where hidden
#pragma once

#include "core/mask/philox.h"
#include "cuda/common/element.cuh"
#include "cuda/common/sequence.cuh"

namespace tessera::cuda {

enum class Major { kQueries, kKeys };

__device__ inline int lane_major() { return threadIdx.x % 32 / 4; }
__device__ inline int lane_minor() { return threadIdx.x % 4 * 2; }

// Logits are kept in units of log2, which saves a multiplication a score; for fp32 inputs, where it
// would also cost a rounding, in units of e. kToLog2: the factor that is left to the exponential.
template <typename T>
inline constexpr float kToLog2 = sizeof(T) == 4 ? kLog2e : 1.f;
template <typename T>
inline constexpr float kFromNatural = sizeof(T) == 4 ? 1.f : kLog2e;

// Where a bias may stand, a row whose greatest logit so far is at or below this has seen nothing
// (docs/semantics.md, "Very low scores"). Beside a greatest logit above it, scores 104 further down
// weigh 0 by themselves, so that kernels look at maxima and never at single scores.
inline constexpr float kLowest = -16777216.f;        // -2^24, natural
inline constexpr float kLowest2 = kLowest * kLog2e;  // in units of log2

// Factor from raw scores to logits where nothing stands between them.
template <typename T>
__device__ float logit_scale(const Params& p) {
  return fmaxf(p.softmax_scale * kFromNatural<T>, kZeroScale);
}

// ---- walking a fragment ----

// Which query and head a row of a tile is: rows of a tile are queries from `origin` on, or, where
// `pack` heads of a group share a tile, query by query the heads from head0 on.
struct TileRows {
  int origin, head0, pack;
  __device__ int query(int row) const { return origin + (pack == 1 ? row : row / pack); }
  __device__ int head(int row) const { return head0 + (pack == 1 ? 0 : row % pack); }
};

// Calls body(e, row, key, of_row(row)) for each value of the fragment at (major0, minor0); of_row
// once for each row. Rows are those of a tile, keys are positions.
template <int kN, Major kMajor, typename OfRow, typename Body>
__device__ __forceinline__ void for_each_score(int major0, int minor0, const OfRow& of_row,
                                               const Body& body) {
  const int major = major0 + lane_major(), minor = minor0 + lane_minor();
  if constexpr (kMajor == Major::kQueries) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = major + 8 * half;
      const auto data = of_row(row);
#pragma unroll
      for (int i = 0; i < kN / 4; ++i) {
        body(4 * (i / 2) + 2 * half + i % 2, row, minor + 8 * (i / 2) + i % 2, data);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < kN / 4; ++i) {
      const int row = minor + 8 * (i / 2) + i % 2;
      const auto data = of_row(row);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        body(4 * (i / 2) + 2 * half + i % 2, row, major + 8 * half, data);
      }
    }
  }
}

// ---- the steps; each is one loop over the fragment behind one uniform branch ----

// Hides what the band hides.
template <int kN, Major kMajor>
__device__ __forceinline__ void apply_band(float (&s)[kN / 2], const Band& band,
                                           const TileRows& rows, int major0, int minor0) {
  for_each_score<kN, kMajor>(
      major0, minor0, [&](int row) { return band.row(rows.query(row)); },
      [&](int e, int, int key, Interval keys) { s[e] = keys.contains(key) ? s[e] : -kInfinity; });
}

// tanh y. kPrecise: to the last digits; else to 1e-6 of itself, however small: where 1 - 2 / (...)
// cancels stands the Taylor series, off by 62/2835 y^8, 4e-7 at most. The errors of a large cap's
// logits are those of the logits, not of the cap.
template <bool kPrecise>
__device__ inline float hyperbolic_tangent(float y) {
  if constexpr (kPrecise) return tanhf(y);
  constexpr float kSmall = 0.25f;
  const float y2 = y * y;
  const float series = fmaf(y * y2, fmaf(y2, fmaf(y2, -17.f / 315, 2.f / 15), -1.f / 3), y);
  // Large y makes the exponential +inf and the result 1; NaN passes, which a clamp would not let.
  const float whole = fmaf(-2.f, reciprocal_approx(1 + exp2_approx(y * (2 * kLog2e))), 1.f);
  return fabsf(y) < kSmall ? series : whole;
}

// The nearest row or key that exists: what stands beyond is hidden by the band, whatever is read
// for it.
__device__ inline int existing(int position, int length) {
  return max(min(position, length - 1), 0);
}

// body(e, value) with the element of a [b|1, hq|1, sq|1, sk|1] tensor of B for every score of the
// fragment; two at a time where rows are dense, aligned and whole.
template <typename B, int kN, Major kMajor, typename Body>
__device__ __forceinline__ void for_each_element(const Params& p, const View& view,
                                                 const Sequence& sequence, const TileRows& rows,
                                                 int major0, int minor0, const Body& body) {
  const int64_t step = view.stride[3];
  const int first_row = dense_start<SideOfQueries>(p, sequence.n, sequence.q.length);
  const int first_key = dense_start<SideOfKeys>(p, sequence.n, sequence.k.length);
  const auto of_row = [&](int row) {
    return static_cast<const B*>(view.data) +
           offset_of(view, sequence.n, rows.head(row),
                     first_row + existing(rows.query(row), sequence.q.length)) +
           first_key * step;
  };
  struct alignas(2 * sizeof(B)) Pair {
    B value[2];
  };
  if (kMajor == Major::kQueries && step == 1 && view.vector_bytes % sizeof(Pair) == 0 &&
      first_key % 2 == 0 && minor0 + kN <= sequence.k.length) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const B* row = of_row(major0 + lane_major() + 8 * half) + minor0 + lane_minor();
#pragma unroll
      for (int i = 0; i < kN / 8; ++i) {
        const Pair pair = *reinterpret_cast<const Pair*>(row + 8 * i);
        body(4 * i + 2 * half, pair.value[0]);
        body(4 * i + 2 * half + 1, pair.value[1]);
      }
    }
  } else {
    for_each_score<kN, kMajor>(major0, minor0, of_row, [&](int e, int, int key, const B* row) {
      body(e, row[existing(key, sequence.k.length) * step]);
    });
  }
}

// The bias of every score of the fragment: body(e, bias).
template <typename T, int kN, Major kMajor, typename Body>
__device__ __forceinline__ void for_each_bias(const Params& p, const Sequence& sequence,
                                              const TileRows& rows, int major0, int minor0,
                                              const Body& body) {
  const View& bias = p.tensor[TESSERA_BIAS];
  const auto convert = [&](int e, auto value) { body(e, static_cast<float>(value)); };
  if (sizeof(T) == 4 || bias.dtype == TESSERA_FP32) {
    for_each_element<float, kN, kMajor>(p, bias, sequence, rows, major0, minor0, convert);
  } else {
    for_each_element<T, kN, kMajor>(p, bias, sequence, rows, major0, minor0, convert);
  }
}

__device__ inline float slope_of(const Params& p, int n, int head) {
  const View& slopes = p.tensor[TESSERA_ALIBI_SLOPES];
  return load_float(slopes.data, offset_of(slopes, n, head), slopes.dtype);
}

// Calls body(e, row, |i + shift - j|) for each value of the fragment: what ALiBi multiplies. One
// conversion a row; the rest are constants apart.
template <int kN, Major kMajor, typename Body>
__device__ __forceinline__ void for_each_distance(const Sequence& sequence, const TileRows& rows,
                                                  int major0, int minor0, const Body& body) {
  const int first_key = kMajor == Major::kQueries ? minor0 + lane_minor() : major0 + lane_major();
  const int under = sequence.band.shift - first_key;
  for_each_score<kN, kMajor>(
      major0, minor0, [&](int row) { return static_cast<float>(rows.query(row) + under); },
      [&](int e, int row, int key, float to_first) {
        body(e, row, fabsf(to_first - static_cast<float>(key - first_key)));
      });
}

// Hides what masks over (query, key) hide: dense mask (kDense), key ranges, segments.
template <int kN, Major kMajor, bool kDense = true>
__device__ __forceinline__ void apply_data_masks(float (&s)[kN / 2], const Params& p,
                                                 const Sequence& sequence, const TileRows& rows,
                                                 int major0, int minor0) {
  if (const View& mask = p.tensor[TESSERA_MASK]; kDense && mask.data) {
    const bool drops = (p.flags & TESSERA_MASK_DROP) != 0;
    for_each_element<uint8_t, kN, kMajor>(
        p, mask, sequence, rows, major0, minor0,
        [&](int e, uint8_t shows) { s[e] = (shows != 0) != drops ? s[e] : -kInfinity; });
  }
  if (p.num_ranges > 0) {
    const View& ranges = p.tensor[TESSERA_KEY_RANGES];
    const int start = range_start(p, sequence.n);
    struct Pair {
      Interval a, b;
    };
    for_each_score<kN, kMajor>(
        major0, minor0,
        [&](int row) {
          const int query = existing(rows.query(row), sequence.q.length);
          const int* at =
              static_cast<const int*>(ranges.data) +
              offset_of(ranges, sequence.q.batch, rows.head(row), sequence.q.first + query);
          const int64_t step = ranges.stride[3];
          const auto range = [&](int i) {
            return Interval{key_of_position(at[2 * i * step], start),
                            key_of_position(at[(2 * i + 1) * step], start)};
          };
          return Pair{range(0), p.num_ranges > 1 ? range(1) : Interval{0, 0}};
        },
        [&](int e, int, int key, const Pair& pair) {
          s[e] = pair.a.contains(key) || pair.b.contains(key) ? s[e] : -kInfinity;
        });
  }
  if (const View& of_query = p.tensor[TESSERA_SEGMENT_IDS_Q]; of_query.data) {
    const View& of_key = p.tensor[TESSERA_SEGMENT_IDS_K];
    const int* keys = static_cast<const int*>(of_key.data) +
                      offset_of(of_key, sequence.k.batch, sequence.k.first);
    for_each_score<kN, kMajor>(
        major0, minor0,
        [&](int row) {
          const int query = existing(rows.query(row), sequence.q.length);
          return static_cast<const int*>(
              of_query.data)[offset_of(of_query, sequence.q.batch, sequence.q.first + query)];
        },
        [&](int e, int, int key, int segment) {
          const int at = existing(key, sequence.k.length);
          s[e] = keys[at * of_key.stride[1]] == segment ? s[e] : -kInfinity;
        });
  }
}

// 1 - tanh(y)^2, right to its last digits where tanh is all but 1.
__device__ inline float tangent_slope(float y) {
  const float e = exp2_approx(fabsf(y) * (-2 * kLog2e));
  return 4 * e * __fdividef(1.f, (1 + e) * (1 + e));
}

// All of it: raw scores become logits (units as above), hidden ones -inf. clean: the band hides
// nothing here. cap_slope, where not null, becomes the softcap's derivative. shown: nor do the data
// masks.
template <typename T, int kN, Major kMajor>
__device__ __forceinline__ void shape_scores(float (&s)[kN / 2], float (*cap_slope)[kN / 2],
                                             const Params& p, const Sequence& sequence,
                                             TileRows rows, int major0, int minor0, bool clean,
                                             bool shown = false) {
  // What only features need is not to be computed ahead of the caller's loop and held in registers.
  asm volatile("" : "+r"(major0), "+r"(minor0), "+r"(rows.origin), "+r"(rows.head0));
  constexpr int kCount = kN / 2;
  const bool has_bias = p.tensor[TESSERA_BIAS].data != nullptr;
  const bool pre_scale = has_bias && (p.flags & TESSERA_BIAS_PRE_SCALE) != 0;
  const bool capped = (p.flags & TESSERA_SOFTCAP) != 0;
  const float scale = logit_scale<T>(p);
  if (const View& k_scale = p.tensor[TESSERA_K_SCALE]; k_scale.data) {
    const float factor = load_float(
        k_scale.data, offset_of(k_scale, sequence.n, rows.head0 / p.group), TESSERA_FP32);
#pragma unroll
    for (int e = 0; e < kCount; ++e) s[e] *= factor;
  }
  if (pre_scale) {
    // Hidden below; under a cap -inf times a scale of 0 would leave a NaN in cap_slope.
    const float hidden = capped ? 0.f : -kInfinity;
    for_each_bias<T, kN, kMajor>(p, sequence, rows, major0, minor0, [&](int e, float bias) {
      s[e] += bias == -kInfinity ? hidden : bias;
    });
  }
  if (capped) {
    const float inner = p.softmax_scale / p.softcap, outer = p.softcap * kFromNatural<T>;
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      const float y = s[e] * inner;
      if (cap_slope) (*cap_slope)[e] = tangent_slope(y);
      s[e] = hyperbolic_tangent<sizeof(T) == 4>(y) * outer;
    }
    if (pre_scale) {  // the cap made -inf finite
      for_each_bias<T, kN, kMajor>(p, sequence, rows, major0, minor0, [&](int e, float bias) {
        s[e] = bias == -kInfinity ? bias : s[e];
      });
    }
  } else {
#pragma unroll
    for (int e = 0; e < kCount; ++e) s[e] *= scale;
    if (cap_slope) {
#pragma unroll
      for (int e = 0; e < kCount; ++e) (*cap_slope)[e] = 1;
    }
  }
  if (has_bias && !pre_scale) {
    for_each_bias<T, kN, kMajor>(p, sequence, rows, major0, minor0,
                                 [&](int e, float bias) { s[e] += bias * kFromNatural<T>; });
  }
  if (p.tensor[TESSERA_ALIBI_SLOPES].data) {
    if (rows.pack == 1) {
      const float slope = slope_of(p, sequence.n, rows.head0) * kFromNatural<T>;
      for_each_distance<kN, kMajor>(sequence, rows, major0, minor0,
                                    [&](int e, int, float distance) { s[e] -= slope * distance; });
    } else {
      for_each_distance<kN, kMajor>(
          sequence, rows, major0, minor0, [&](int e, int row, float distance) {
            s[e] -= slope_of(p, sequence.n, rows.head(row)) * kFromNatural<T> * distance;
          });
    }
  }
  if (!shown) apply_data_masks<kN, kMajor>(s, p, sequence, rows, major0, minor0);
  if (!clean) apply_band<kN, kMajor>(s, sequence.band, rows, major0, minor0);
}

// ---- dropout ----

// Where a sequence stands in the dropout mask: counters of the patch that its row and key 0 lie in,
// and rows and columns of that patch before them.
struct DropoutOrigin {
  uint32_t row = 0, column = 0;
  int rows = 0, columns = 0;

  // True if (i, j), counted from the first row and column of that patch, is kept. What counters,
  // which have 32 bits, leave of the patch's own position is all that matters.
  __device__ bool keep(const Dropout& dropout, uint32_t head_index, int i, int j) const {
    return dropout.keep(head_index, int64_t{row} * 2 + i, int64_t{column} * 4 + j);
  }
};

__device__ __forceinline__ DropoutOrigin dropout_origin(const Params& p, int n) {
  if (!p.has_positions) return {};
  const int64_t i = position_at(p.positions.q_start, n), j = position_at(p.positions.k_start, n);
  return {static_cast<uint32_t>(i >> 4) * 8, static_cast<uint32_t>(j >> 4) * 4,
          static_cast<int>(i & 15), static_cast<int>(j & 15)};
}

// The fragment layout of Philox (core/mask/philox.h): with both origins multiples of 16, a thread
// of an S fragment needs one call for the eight values of two neighbouring 8-column tiles. A thread
// of an S^T fragment needs halves of two calls, and the thread whose lane differs by 4 the other
// halves: each makes one call and they trade.
//
// Sets bit e where value e of the fragment is kept. head_index: of head_index_of(); positions are
// counted from the origin, and multiples of 16.
template <int kN, Major kMajor, int kUnrolled>
__device__ __forceinline__ void dropout_bits_of_patches(const Dropout& dropout, uint32_t head_index,
                                                        int major0, int minor0,
                                                        uint32_t (&bits)[(kN + 63) / 64],
                                                        const DropoutOrigin& origin = {}) {
#pragma unroll
  for (int i = 0; i < (kN + 63) / 64; ++i) bits[i] = 0;
  const int lane = threadIdx.x % 32;
#pragma unroll kUnrolled
  for (int i = 0; i < kN / 16; ++i) {  // patches of 16 x 16
    const int minor16 = minor0 / 16 + i;
    uint32_t field[4];  // two 16-bit fields each: (major + 0, minor + 0 and 1), (+0, +8 and +9),
                        // (+8, ...)
    if constexpr (kMajor == Major::kQueries) {
      const Philox4 random = philox4x32_7(dropout.key0, dropout.key1, dropout.counter0, head_index,
                                          origin.row + major0 / 16 * 8 + lane / 4,
                                          origin.column + minor16 * 4 + lane % 4);
#pragma unroll
      for (int w = 0; w < 4; ++w) field[w] = random.word[w];
    } else {
      // Call (query r, key pair c) has words (r, c..), (r, c+8..), (r+8, c..), (r+8, c+8..). This
      // thread's keys are lane / 4 and + 8, its queries lane % 4 * 2 + {0, 1, 8, 9}: it calls for
      // the query of its key's parity.
      const int parity = lane / 4 % 2;
      const Philox4 random = philox4x32_7(dropout.key0, dropout.key1, dropout.counter0, head_index,
                                          origin.row + minor16 * 8 + lane % 4 * 2 + parity,
                                          origin.column + major0 / 16 * 4 + lane / 8);
      // Halves by key parity: mine stay, the others go to the neighbour in keys.
      const uint32_t mine = parity ? 0x7632 : 0x5410, theirs = parity ? 0x5410 : 0x7632;
      const uint32_t my_q0 = __byte_perm(random.word[0], random.word[1], mine);  // query r
      const uint32_t my_q8 = __byte_perm(random.word[2], random.word[3], mine);  // query r + 8
      const uint32_t got_q0 =
          __shfl_xor_sync(~0u, __byte_perm(random.word[0], random.word[1], theirs), 4);
      const uint32_t got_q8 =
          __shfl_xor_sync(~0u, __byte_perm(random.word[2], random.word[3], theirs), 4);
      // Low half: key lane / 4, high half: + 8. Even queries come from the even-parity thread.
      const uint32_t even0 = parity ? got_q0 : my_q0, odd0 = parity ? my_q0 : got_q0;
      const uint32_t even8 = parity ? got_q8 : my_q8, odd8 = parity ? my_q8 : got_q8;
      field[0] = __byte_perm(even0, odd0, 0x5410);  // key + 0: queries +0, +1
      field[1] = __byte_perm(even8, odd8, 0x5410);  // key + 0: queries +8, +9
      field[2] = __byte_perm(even0, odd0, 0x7632);  // key + 8: queries +0, +1
      field[3] = __byte_perm(even8, odd8, 0x7632);  // key + 8: queries +8, +9
    }
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const int e =
          8 * i + 4 * (w % 2) + 2 * (w / 2);  // minor + 8 is the next tile, major + 8 half 1
      const uint32_t keep_low = (field[w] & 0xFFFF) >= dropout.threshold;
      const uint32_t keep_high = field[w] >> 16 >= dropout.threshold;
      bits[kN <= 64 ? 0 : e / 32] |= (keep_low | keep_high << 1) << (e % 32);
    }
  }
}

// The same at any position of the sequence.
template <int kN, Major kMajor>
__device__ __forceinline__ void dropout_bits(const Dropout& dropout, uint32_t head_index,
                                             int major0, int minor0,
                                             uint32_t (&bits)[(kN + 63) / 64],
                                             const DropoutOrigin& origin = {}) {
  major0 += kMajor == Major::kQueries ? origin.rows : origin.columns;
  minor0 += kMajor == Major::kQueries ? origin.columns : origin.rows;
  if ((major0 | minor0) % 16 == 0) {
    constexpr int kUnrolled = kN <= 64 ? 1 : kN / 16;  // one word of bits needs no constant index
    dropout_bits_of_patches<kN, kMajor, kUnrolled>(dropout, head_index, major0, minor0, bits,
                                                   origin);
    return;
  }
  // pages of odd sizes, and starts that are no multiples of 16
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (uint32_t& word : bits) {
    const int first = static_cast<int>(&word - bits) * 32;
    word = 0;
#pragma unroll 1
    for (int e = first; e < first + 32 && e < kN / 2; ++e) {
      const int major = major0 + lane / 4 + 8 * (e / 2 % 2);
      const int minor = minor0 + lane % 4 * 2 + 8 * (e / 4) + e % 2;
      const bool keep = kMajor == Major::kQueries ? origin.keep(dropout, head_index, major, minor)
                                                  : origin.keep(dropout, head_index, minor, major);
      word |= static_cast<uint32_t>(keep) << (e - first);
    }
  }
}

__device__ inline Dropout dropout_of(const Params& p) {
  const View& state = p.tensor[TESSERA_RNG_STATE];
  const int64_t* words = static_cast<const int64_t*>(state.data);
  return Dropout::make(words[0], words[state.stride[0]], p.dropout_threshold);
}
// The word that tells head h of sequence n from others. Where it is a constant of the problem no
// memory is read.
__device__ __forceinline__ uint32_t head_index_of(const Params& p, int n, int h) {
  const View& state = p.tensor[TESSERA_RNG_STATE];
  return DropoutHeads::of(static_cast<const int64_t*>(state.data), state.stride[0], p.rng_words,
                          p.hq)
      .index(n, h);
}

}  // namespace tessera::cuda
