// SPDX-License-Identifier: Apache-2.0
// Scores of one strip of queries against one block of keys, as S^T: a key a row of kVectors
// vectors, a query a lane. What both passes share: which keys a strip sees, and what becomes of q.k
// before the softmax. Included by kernels_*.cc only; see simd/types.h for S.
//
//   StripRows     which (token, head) each lane is, with its interval of keys, segment, slope
//   find_visible  which keys of a block its lanes see: none, all, or one bit each
//   finish_scores S := x in the pass's unit (scale, biases, softcap, ALiBi), hidden := -inf, and
//                 its row maximum
//
// A mask is one function here: band and key ranges are an interval a lane, and everything else that
// hides is ANDed into the same bits.
#pragma once

#include "cpu/call.h"
#include "cpu/simd/types.h"
#include "cpu/tiles.h"

namespace tessera::cpu {
namespace {

constexpr float kInfinity = __builtin_inff();
constexpr float kLargest = __FLT_MAX__;
constexpr float kHiddenScore = -16777216.0f;  // -2^24: a score no higher is -inf

template <typename T>
TESSERA_INLINE T smaller(T a, T b) {
  return b < a ? b : a;
}
template <typename T>
TESSERA_INLINE T larger(T a, T b) {
  return a < b ? b : a;
}

TESSERA_INLINE const char* at(const Strided& t, int64_t a, int64_t b = 0, int64_t c = 0,
                              int64_t d = 0) {
  return t.data + a * t.stride[0] + b * t.stride[1] + c * t.stride[2] + d * t.stride[3];
}
TESSERA_INLINE int32_t load_int32(const char* p) {
  int32_t x;
  memcpy(&x, p, sizeof x);
  return x;
}

// One element of a storage type as fp32.
template <typename S>
TESSERA_INLINE float load_scalar(const char* p, int32_t dtype) {
  float lanes[S::kLanes];
  switch (dtype) {
    case TESSERA_FP32:
      memcpy(lanes, p, sizeof(float));
      break;
    case TESSERA_BF16:
      S::store(lanes, S::load_n(reinterpret_cast<const Bf16*>(p), 1));
      break;
    default:
      S::store(lanes, S::load_n(reinterpret_cast<const Fp16*>(p), 1));
  }
  return lanes[0];
}

// ---- rows ----

// Lanes from count on repeat the last row, so that they hide and read nothing of their own.
template <typename S>
struct StripRows {
  static constexpr int kStrip = Tile<S>::kStrip;

  int count;    // 1 .. kStrip
  int vectors;  // 1 if count <= kLanes, else 2
  bool one_head;
  bool consecutive;  // token(l) = token(0) + l
  int64_t token[kStrip];
  int64_t head[kStrip];

  // Keys [lo, hi) that a row sees by band and key ranges; [lo2, hi2) beside them with two ranges.
  bool two_ranges;
  int64_t lo[kStrip], hi[kStrip], lo2[kStrip], hi2[kStrip];
  int64_t key_begin, key_end;  // bounds of all of them
  int64_t lo_max, hi_min;      // [lo_max, hi_min) is in the first interval of every row

  alignas(64) int32_t segment[kStrip];
  int32_t segment_min, segment_max;
  // ALiBi, times score_unit; the second holds the digits that the first has not: distances are
  // long.
  alignas(64) float slope[kStrip];
  alignas(64) float slope_low[kStrip];
  const char* bias[kStrip];  // this row's bias of key 0
  const char* mask[kStrip];  // this row's mask byte of key 0

  // Lane l is (token(l), head(l)) for l < n.
  void resolve(const Call& call, const CallSequence& sequence, int n);
};

template <typename S>
TESSERA_INLINE Interval clamp_to(Interval range, Interval band) {
  return {larger(range.lo, band.lo), smaller(range.hi, band.hi)};
}

// A key range, of positions, as keys of the sequence.
TESSERA_INLINE Interval range_at(const char* p, int64_t step, int64_t k_start) {
  return {load_int32(p) - k_start, load_int32(p + step) - k_start};
}

template <typename S>
void StripRows<S>::resolve(const Call& call, const CallSequence& sequence, int n) {
  count = n;
  vectors = n <= S::kLanes ? 1 : 2;
  one_head = true, consecutive = true;
  two_ranges = call.key_ranges.data && call.key_range_columns == 4;
  key_begin = INT64_MAX, key_end = 0, lo_max = 0, hi_min = INT64_MAX;
  segment_min = INT32_MAX, segment_max = INT32_MIN;
  for (int l = 0; l < kStrip; ++l) {
    if (l >= n) token[l] = token[n - 1], head[l] = head[n - 1];
    const int64_t i = token[l], h = head[l];
    one_head &= h == head[0];
    consecutive &= l >= n || i == token[0] + l;

    Interval keys = sequence.band.row(i), second{0, 0};
    if (call.key_ranges.data) {
      const char* p = call.key_ranges_thd ? at(call.key_ranges, 0, h, sequence.first_q + i)
                                          : at(call.key_ranges, sequence.n, h, i);
      const int64_t step = call.key_ranges.stride[3];
      if (two_ranges) {
        second = clamp_to<S>(range_at(p + 2 * step, step, sequence.k_start), keys);
      }
      keys = clamp_to<S>(range_at(p, step, sequence.k_start), keys);
    }
    if (keys.empty()) keys = {0, 0};
    if (second.empty()) second = {0, 0};
    lo[l] = keys.lo, hi[l] = keys.hi, lo2[l] = second.lo, hi2[l] = second.hi;
    if (!keys.empty()) key_begin = smaller(key_begin, keys.lo);
    if (!second.empty()) key_begin = smaller(key_begin, second.lo);
    key_end = larger(key_end, larger(keys.hi, second.hi));
    lo_max = larger(lo_max, keys.lo), hi_min = smaller(hi_min, keys.hi);

    if (call.segments_q.data) {
      segment[l] = load_int32(at(call.segments_q, sequence.batch_q, sequence.first_q + i));
      segment_min = smaller(segment_min, segment[l]);
      segment_max = larger(segment_max, segment[l]);
    }
    if (call.slopes.data) {
      const float given = load_scalar<S>(at(call.slopes, sequence.n, h), call.slopes.dtype);
      const double exact = call.score_unit == 1 ? given : given * 1.4426950408889634;
      const double both = smaller<double>(larger<double>(exact, -kLargest), kLargest);
      slope[l] = static_cast<float>(both);
      slope_low[l] = static_cast<float>(both - slope[l]);
    }
    const int64_t row = sequence.dense_q + i, key = sequence.dense_k;
    if (call.bias.data) bias[l] = at(call.bias, sequence.n, h, row, key);
    if (call.mask.data) mask[l] = at(call.mask, sequence.n, h, row, key);
  }
}

// ---- keys ----

// Keys [n0, n0 + count) of a sequence; n0 is a multiple of kBlock.
template <typename S>
struct Keys {
  static constexpr int kBlock = Tile<S>::kBlock;
  int64_t n0;
  int count;
  int32_t segment[kBlock];
  int32_t segment_min, segment_max;

  void resolve(const Call& call, const CallSequence& sequence, int64_t first) {
    n0 = first;
    count = static_cast<int>(smaller<int64_t>(sequence.band.len_k - first, kBlock));
    if (!call.segments_k.data) return;
    segment_min = INT32_MAX, segment_max = INT32_MIN;
    for (int j = 0; j < count; ++j) {
      const int64_t row = sequence.first_k + first + j;
      segment[j] = load_int32(at(call.segments_k, sequence.batch_k, row));
      segment_min = smaller(segment_min, segment[j]);
      segment_max = larger(segment_max, segment[j]);
    }
  }
};

// ---- visibility ----

// Keys of a block that a strip sees: [first, last) holds them all, first a multiple of 8, and
// [begin[v], end[v]) those of vector v alone. Those of two vectors overlap, or one is empty: 0, 0.
template <typename S>
struct Visible {
  int first, last;
  int begin[kVectors], end[kVectors];  // multiples of 8, but for an end at last
  bool full;                           // every lane sees all of [first, last); bits are not filled
  alignas(64) uint32_t bits[Tile<S>::kBlock / 32][Tile<S>::kStrip];  // bit j % 32 of word j / 32
};

// Bits [lo, hi) of a word, for any lo and hi.
TESSERA_INLINE uint32_t bit_range(int64_t lo, int64_t hi) {
  lo = larger<int64_t>(lo, 0), hi = smaller<int64_t>(hi, 32);
  if (lo >= hi) return 0;
  return (~uint32_t{0} >> (32 - (hi - lo))) << lo;
}

// The same in lanes, for lo and hi in [0, kBlock] from the word's first bit on: 2^hi - 2^lo.
template <typename S>
TESSERA_INLINE typename S::I bit_ranges(const int32_t* lo, const int32_t* hi, int32_t base) {
  const auto nothing = S::set1i(0), whole = S::set1i(32), one = S::set1i(1), from = S::set1i(base);
  const auto clamp = [&](const int32_t* end) {
    return S::max(S::min(S::sub(S::load(end), from), whole), nothing);
  };
  const auto first = clamp(lo), last = S::max(clamp(hi), first);
  return S::sub(S::shift_left(one, last), S::shift_left(one, first));
}

template <typename S>
__attribute__((noinline)) void fill_interval_bits(const StripRows<S>& rows, const Keys<S>& keys,
                                                  Visible<S>& visible) {
  constexpr int L = S::kLanes;
  alignas(64) int32_t ends[4][Tile<S>::kStrip];
  const auto resolve = [&](const int64_t* key, int32_t* end) {
    for (int l = 0; l < rows.vectors * L; ++l) {
      const int64_t clamped = smaller<int64_t>(larger<int64_t>(key[l] - keys.n0, 0), keys.kBlock);
      end[l] = static_cast<int32_t>(clamped);
    }
  };
  resolve(rows.lo, ends[0]), resolve(rows.hi, ends[1]);
  if (rows.two_ranges) resolve(rows.lo2, ends[2]), resolve(rows.hi2, ends[3]);
  for (int word = 0; word * 32 < keys.count; ++word) {
    for (int l = 0; l < rows.vectors * L; l += L) {
      auto bits = bit_ranges<S>(ends[0] + l, ends[1] + l, word * 32);
      if (rows.two_ranges) {
        bits = S::bit_or(bits, bit_ranges<S>(ends[2] + l, ends[3] + l, word * 32));
      }
      S::store(reinterpret_cast<int32_t*>(visible.bits[word] + l), bits);
    }
  }
}

template <typename S>
void and_mask_bits(const Call& call, const StripRows<S>& rows, const Keys<S>& keys,
                   Visible<S>& visible) {
  const int lanes = rows.vectors * S::kLanes;
  const uint32_t flip = call.mask_hides ? ~uint32_t{0} : 0;
  const int64_t step = call.mask.stride[3];
  for (int word = 0; word * 32 < keys.count; ++word) {
    const int64_t j = keys.n0 + word * 32;
    const int n = smaller(keys.count - word * 32, 32);
    uint32_t bits = 0;
    for (int l = 0; l < lanes; ++l) {
      if (l == 0 || rows.mask[l] != rows.mask[l - 1]) {
        const auto* bytes = reinterpret_cast<const uint8_t*>(rows.mask[l]);
        bits = (step ? S::nonzero_bytes(bytes + j, n) : *bytes ? ~uint32_t{0} : 0) ^ flip;
      }
      visible.bits[word][l] &= bits;
    }
  }
}

template <typename S>
void and_segment_bits(const StripRows<S>& rows, const Keys<S>& keys, Visible<S>& visible) {
  for (int v = 0; v < rows.vectors; ++v) {
    const auto mine = S::load(rows.segment + v * S::kLanes);
    for (int word = 0; word * 32 < keys.count; ++word) {
      auto* bits = reinterpret_cast<int32_t*>(visible.bits[word] + v * S::kLanes);
      auto same = S::set1i(0);
      for (int j = word * 32; j < smaller(word * 32 + 32, keys.count); ++j) {
        const auto bit = S::set1i(static_cast<int32_t>(uint32_t{1} << (j % 32)));
        same =
            S::bit_or(same, S::select(S::equal(mine, S::set1i(keys.segment[j])), bit, S::set1i(0)));
      }
      S::store(bits, S::bit_and(S::load(bits), same));
    }
  }
}

// Trims the ranges to what some lane sees and says whether there is anything; sets full.
template <typename S>
bool summarise(const StripRows<S>& rows, const Keys<S>& keys, Visible<S>& visible) {
  visible.first = INT32_MAX, visible.last = 0, visible.full = true;
  for (int v = 0; v < rows.vectors; ++v) {
    int first = -1, last = 0;
    for (int word = 0; word * 32 < keys.count; ++word) {
      const uint32_t* bits = visible.bits[word] + v * S::kLanes;
      uint32_t any = 0, all = ~uint32_t{0};
      for (int l = 0; l < S::kLanes; ++l) any |= bits[l], all &= bits[l];
      const uint32_t present = bit_range(0, keys.count - word * 32);
      visible.full &= (all & present) == present;
      any &= present;
      if (any == 0) continue;
      if (first < 0) first = word * 32 + __builtin_ctz(any);
      last = word * 32 + 32 - __builtin_clz(any);
    }
    visible.begin[v] = first < 0 ? 0 : first - first % 8;
    visible.end[v] = last;
    if (first < 0) continue;
    visible.first = smaller(visible.first, visible.begin[v]);
    visible.last = larger(visible.last, last);
  }
  for (int v = 0; v < rows.vectors; ++v) {
    visible.end[v] = smaller((visible.end[v] + 7) / 8 * 8, visible.last);
  }
  const int both = larger(visible.begin[0], visible.begin[1]);
  const int after = smaller(visible.end[0], visible.end[1]);
  if (rows.vectors == 2 && visible.last > 0 && after > 0 && both >= after) {  // with a gap
    for (int v = 0; v < 2; ++v) visible.begin[v] = visible.first, visible.end[v] = visible.last;
  }
  return visible.last > 0;
}

// False if no row sees any key of the block.
template <typename S>
bool find_visible(const Call& call, const StripRows<S>& rows, const Keys<S>& keys,
                  Visible<S>& visible) {
  const int64_t end = keys.n0 + keys.count;
  if (rows.key_end <= keys.n0 || rows.key_begin >= end) return false;
  bool by_segment = false;
  if (call.segments_q.data) {
    if (keys.segment_max < rows.segment_min || rows.segment_max < keys.segment_min) return false;
    by_segment = keys.segment_min != keys.segment_max || rows.segment_min != rows.segment_max;
  }
  const bool by_interval = rows.lo_max > keys.n0 || rows.hi_min < end;
  if (!by_interval && !by_segment && !call.mask.data) {
    visible.first = 0, visible.last = keys.count, visible.full = true;
    for (int v = 0; v < kVectors; ++v) visible.begin[v] = 0, visible.end[v] = keys.count;
    return true;
  }
  fill_interval_bits(rows, keys, visible);
  if (call.mask.data) and_mask_bits(call, rows, keys, visible);
  if (by_segment) and_segment_bits(rows, keys, visible);
  return summarise(rows, keys, visible);
}

// Keys that the same vectors of a strip see: all N of them, or vector v alone.
struct Run {
  int first, last, vector;
  bool all;
};

// [first, last) of a strip in order: what one vector sees before both do, both, and after.
template <typename S, int N>
TESSERA_INLINE int find_runs(const Visible<S>& visible, Run (&runs)[3]) {
  const int *begin = visible.begin, *end = visible.end;
  if constexpr (N == kVectors && !S::kNarrow) {
    if (begin[0] >= end[0] || begin[1] >= end[1]) {
      const int seen = begin[0] < end[0] ? 0 : 1;
      runs[0] = {begin[seen], end[seen], seen, false};
      return 1;
    }
    const int early = begin[0] <= begin[1] ? 0 : 1, late = end[0] >= end[1] ? 0 : 1;
    const int both = begin[1 - early], after = end[1 - late];
    int count = 0;
    if (begin[early] < both) runs[count++] = {begin[early], both, early, false};
    runs[count++] = {both, after, 0, true};
    if (after < end[late]) runs[count++] = {after, end[late], late, false};
    return count;
  }
  runs[0] = {visible.first, visible.last, 0, true};
  return 1;
}

// ---- scores ----

// tanh(y) = y P(y^2) / Q(y^2) up to |y| = end, past which it is 1.
template <int kTermsP, int kTermsQ>
struct TanhFit {
  float end;
  float p[kTermsP], q[kTermsQ];
};

// Relative error 3e-8.
constexpr TanhFit<5, 5> kTanh = {
    9.0f,
    {0.9999999803f, 0.1338288815f, 0.00349779982f, 2.064550906e-5f, 1.340531968e-8f},
    {1.0f, 0.4671620432f, 0.02588539678f, 3.289252482e-4f, 7.797245558e-7f}};

// Error 8e-6, past the end 1e-5: half of a digit of a weight that is rounded to bf16 beside a
// softcap of 50.
constexpr float kMaxFastCap = 64.0f;  // an error of 6e-4 in lse, which may have 1e-3
constexpr TanhFit<3, 4> kTanhFast = {6.0f,
                                     {0.999992669f, 0.114830695f, 0.00151457626f},
                                     {1.0f, 0.448113918f, 0.017611146f, 5.62718596e-05f}};

template <typename S, int kTerms>
TESSERA_INLINE typename S::F polynomial(const float (&terms)[kTerms], typename S::F x) {
  auto sum = S::set1(terms[kTerms - 1]);
  for (int i = kTerms - 2; i >= 0; --i) sum = S::fma(sum, x, S::set1(terms[i]));
  return sum;
}

template <typename S, int kTermsP, int kTermsQ>
TESSERA_INLINE typename S::F tanh(const TanhFit<kTermsP, kTermsQ>& fit, typename S::F y) {
  y = S::min(S::set1(fit.end), S::max(S::set1(-fit.end), y));  // NaN stays
  const auto y2 = S::mul(y, y);
  return S::mul(S::mul(y, polynomial<S>(fit.p, y2)), S::reciprocal(polynomial<S>(fit.q, y2)));
}

// 1 - tanh(y)^2 = 4 e / (1 + e)^2 with e = exp(-2 |y|): right to its last digits where tanh is all
// but 1, and the difference has none.
template <typename S>
TESSERA_INLINE typename S::F tanh_slope(typename S::F y) {
  const auto e = S::exp2(S::mul(S::abs(y), S::set1(-2.0f * kLog2e)));
  const auto r = S::reciprocal(S::add(e, S::set1(1.0f)));
  return S::mul(S::mul(S::set1(4.0f), e), S::mul(r, r));
}

// Both of one exponential, tanh to 1e-7 and no closer where it is small.
template <typename S>
TESSERA_INLINE typename S::F tanh_with_slope(typename S::F y, float* slope) {
  const auto e = S::exp2(S::mul(S::abs(y), S::set1(-2.0f * kLog2e)));
  const auto r = S::reciprocal(S::add(e, S::set1(1.0f)));
  S::store(slope, S::mul(S::mul(S::set1(4.0f), e), S::mul(r, r)));
  return S::copysign(S::mul(S::sub(S::set1(1.0f), e), r), y);
}

// Biases of keys [j, j + n) of a block, n <= kLanes: key k of lane l in x[k], for vector v of the
// strip. Asks for those that lie bias_ahead further: as many streams as rows are more than the
// hardware follows.
template <typename S>
TESSERA_INLINE void load_bias(const Call& call, const StripRows<S>& rows, int64_t j, int n, int v,
                              typename S::F (&x)[S::kLanes]) {
  constexpr int L = S::kLanes;
  const int64_t step = call.bias.stride[3];
  const auto load = [&](const char* row) {
    if (step == 0) return S::set1(load_scalar<S>(row, call.bias.dtype));
    row += j * step;
    prefetch(row + call.bias_ahead);
    switch (call.bias.dtype) {
      case TESSERA_FP32:
        return S::load_n(reinterpret_cast<const float*>(row), n);
      case TESSERA_BF16:
        return S::load_n(reinterpret_cast<const Bf16*>(row), n);
      default:
        return S::load_n(reinterpret_cast<const Fp16*>(row), n);
    }
  };
  if (call.bias.stride[2] == 0 && (rows.one_head || call.bias.stride[1] == 0)) {  // one row for all
    alignas(64) float keys[L];
    S::store(keys, load(rows.bias[0]));
    TESSERA_UNROLL
    for (int k = 0; k < L; ++k) x[k] = S::broadcast(keys + k);
    return;
  }
  TESSERA_UNROLL
  for (int l = 0; l < L; ++l) x[l] = load(rows.bias[v * L + l]);
  S::transpose(x);
}

enum class BiasAt { kNone, kPreScale, kPostScale };
template <BiasAt kWhere>
struct Bias {
  static constexpr BiasAt kAt = kWhere;
};
enum class Cap { kNone, kExact, kFast };  // kFast: of a bf16 problem

template <typename S, int N>
using FinishScores = void(const Call& call, const CallSequence& sequence, const StripRows<S>& rows,
                          const Keys<S>& keys, const Visible<S>& visible, float* scores,
                          float* maximum, float* slope);

// finish_scores for one combination of what it adds.
template <typename S, int N, BiasAt kBias, Cap kCap, bool kSloped>
__attribute__((noinline)) void finish_scores_with(const Call& call, const CallSequence& sequence,
                                                  const StripRows<S>& rows, const Keys<S>& keys,
                                                  const Visible<S>& visible, float* scores,
                                                  float* maximum, float* slope) {
  constexpr int L = S::kLanes;
  constexpr bool kCapped = kCap != Cap::kNone;
  using F = typename S::F;
  const F hidden = S::set1(-kInfinity), unit = S::set1(call.score_unit);
  const F scale = S::set1(call.raw ? 1.0f : call.score_scale);
  const F into_cap = S::set1(kCapped ? call.softmax_scale / call.softcap : 0.0f);
  const F out_of_cap = S::set1(call.softcap * call.score_unit);
  for (int v = 0; v < N; ++v) {
    const int first = visible.begin[v], last = visible.end[v];
    F top = hidden, distance = S::zero(), steepness = S::zero(), steepness_low = S::zero();
    if (kSloped) {  // of key `first`; exact to 2^24
      alignas(64) float from[L];
      for (int l = 0; l < L; ++l) {
        const int64_t i = rows.token[v * L + l] + sequence.band.shift;
        from[l] = static_cast<float>(i - keys.n0 - first);
      }
      distance = S::load(from), steepness = S::load(rows.slope + v * L);
      steepness_low = S::load(rows.slope_low + v * L);
    }
    const auto finish = [&](int j, F bias) {
      float* s = scores + (j * N + v) * L;
      F x = S::load(s);
      // A bias of -inf hides below; times a scale of 0 it would leave a NaN in the slope.
      const F finite = kCapped ? S::select(S::equal(bias, hidden), S::zero(), bias) : bias;
      if (kBias == BiasAt::kPreScale) x = S::add(x, finite);
      if (kCapped) {
        const F y = S::mul(x, into_cap);
        if constexpr (kCap == Cap::kFast) {
          const F t =
              slope ? tanh_with_slope<S>(y, slope + (j * N + v) * L) : tanh<S>(kTanhFast, y);
          x = S::mul(t, out_of_cap);
        } else {
          if (slope) S::store(slope + (j * N + v) * L, tanh_slope<S>(y));
          x = S::mul(tanh<S>(kTanh, y), out_of_cap);
        }
      } else {
        x = S::mul(x, scale);
      }
      if (kBias == BiasAt::kPostScale) x = S::fma(bias, unit, x);
      if (kSloped) {
        const F apart = S::abs(distance);
        x = S::fnma(steepness, apart, S::fnma(steepness_low, apart, x));
        distance = S::sub(distance, S::set1(1.0f));
      }
      // A bias of -inf hides, whatever scale and softcap made of it.
      if (kBias == BiasAt::kPreScale) x = S::select(S::equal(bias, hidden), hidden, x);
      if (!visible.full) {
        const auto* word = reinterpret_cast<const int32_t*>(visible.bits[j / 32] + v * L);
        const auto bit = S::set1i(static_cast<int32_t>(uint32_t{1} << (j % 32)));
        x = S::select(S::test_bit(S::load(word), bit), x, hidden);
      }
      S::store(s, x);
      top = S::max(x, top);
    };
    if constexpr (kBias == BiasAt::kNone) {
      for (int j = first; j < last; ++j) finish(j, S::zero());
    } else {
      for (int begin = first; begin < last; begin += L) {
        const int n = smaller(last - begin, L);
        F bias[L];
        load_bias<S>(call, rows, keys.n0 + begin, n, v, bias);
        if (n == L) {
          TESSERA_UNROLL
          for (int k = 0; k < L; ++k) finish(begin + k, bias[k]);
        } else {
          alignas(64) float rest[L * L];
          for (int k = 0; k < L; ++k) S::store(rest + k * L, bias[k]);
          for (int k = 0; k < n; ++k) finish(begin + k, S::load(rest + k * L));
        }
      }
    }
    S::store(maximum + v * L, top);
  }
}

// Turns s = q.k in rows [begin[v], end[v]) of scores, for each vector v, into x * score_unit,
// hidden ones into -inf. maximum[v]: the greatest of each lane, -inf if there is none; NaN is
// passed over (it comes back in exp2). s stays unscaled if call.raw. slope, if not null: d
// softcap(x) / dx, laid out as scores.
template <typename S, int N>
void finish_scores(const Call& call, const CallSequence& sequence, const StripRows<S>& rows,
                   const Keys<S>& keys, const Visible<S>& visible, float* scores, float* maximum,
                   float* slope) {
  const auto by_slopes = [&](auto* level, auto* sloped) -> FinishScores<S, N>* {
    return call.slopes.data ? sloped : level;
  };
  const auto by_cap = [&](auto bias) -> FinishScores<S, N>* {
    constexpr BiasAt kBias = decltype(bias)::kAt;
    if (!(call.softcap > 0)) {
      return by_slopes(finish_scores_with<S, N, kBias, Cap::kNone, false>,
                       finish_scores_with<S, N, kBias, Cap::kNone, true>);
    }
    if (call.q.dtype == TESSERA_BF16 && call.softcap <= kMaxFastCap) {
      return by_slopes(finish_scores_with<S, N, kBias, Cap::kFast, false>,
                       finish_scores_with<S, N, kBias, Cap::kFast, true>);
    }
    return by_slopes(finish_scores_with<S, N, kBias, Cap::kExact, false>,
                     finish_scores_with<S, N, kBias, Cap::kExact, true>);
  };
  auto* finish = !call.bias.data       ? by_cap(Bias<BiasAt::kNone>{})
                 : call.bias_pre_scale ? by_cap(Bias<BiasAt::kPreScale>{})
                                       : by_cap(Bias<BiasAt::kPostScale>{});
  finish(call, sequence, rows, keys, visible, scores, maximum, slope);
}

}  // namespace
}  // namespace tessera::cpu
