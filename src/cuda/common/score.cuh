// SPDX-License-Identifier: Apache-2.0
// The score pipeline, from q.k to the exponent: scale, bias, softcap, ALiBi and every mask, written
// once over fragment coordinates.
//
// A fragment is what a warp holds of a product of 16 x N: thread `lane` has N/2 values, and value e is
//     major(e) = lane / 4     + 8 * (e / 2 % 2)            one of two rows, 8 apart
//     minor(e) = lane % 4 * 2 + 8 * (e / 4) + e % 2        pairs of neighbours in every 8 columns
// This is the accumulator of N/8 mma.m16n8 and, seen by one warp, the accumulator of wgmma. The forward
// pass has queries as majors and keys as minors (S); the pass over keys has them swapped (S^T).
//
// In units of log2, so that the exponential is one instruction:
//     x = scale (s + pre) -> softcap tanh(x / softcap) -> + post - slope |i + shift - j|    times log2 e
//     x = -inf where hidden
#pragma once

#include "core/philox.h"
#include "cuda/common/element.cuh"
#include "cuda/common/sequence.cuh"

namespace tessera::cuda {

enum class Major { kQueries, kKeys };

__device__ inline int lane_major() { return threadIdx.x % 32 / 4; }
__device__ inline int lane_minor() { return threadIdx.x % 4 * 2; }

// Keys of one query that the band shows, in 32 bits.
struct KeyInterval {
  int lo, hi;
  __device__ bool contains(int key) const { return lo <= key && key < hi; }
};

// Band::row in 32 bits, which hold every sum: the band of a Sequence reaches no further than its lengths.
__device__ inline KeyInterval keys_of_row(const Band& band, int query) {
  const int length_k = static_cast<int>(band.len_k), left = static_cast<int>(band.left),
            right = static_cast<int>(band.right), under = query + static_cast<int>(band.shift);
  if (query < 0 || query >= static_cast<int>(band.len_q)) return {0, 0};
  return {left < 0 ? 0 : min(max(under - left, 0), length_k),
          right < 0 ? length_k : min(max(under + right + 1, 0), length_k)};
}

// Keys that every one of the rows [m0, m1) sees: tiles inside need no mask code.
__device__ inline KeyInterval keys_of_all_rows(const Band& band, int m0, int m1) {
  return {keys_of_row(band, m1 - 1).lo, m0 < 0 || m1 > static_cast<int>(band.len_q)
                                            ? 0 : keys_of_row(band, m0).hi};
}

// True when something beyond scale and band shapes the scores: such problems run the rich kernels.
TESSERA_HOST_DEVICE bool is_rich(const Params& p) {
  constexpr uint32_t kFlags = TESSERA_SOFTCAP | TESSERA_DROPOUT;
  return (p.flags & kFlags) != 0 || p.tensor[TESSERA_BIAS].data || p.tensor[TESSERA_MASK].data ||
         p.num_ranges != 0 || p.tensor[TESSERA_SEGMENT_IDS_Q].data ||
         p.tensor[TESSERA_ALIBI_SLOPES].data || p.tensor[TESSERA_K_SCALE].data ||
         p.tensor[TESSERA_V_SCALE].data || p.tensor[TESSERA_K].dtype >= TESSERA_E4M3 ||
         p.page_size != 0;
}

// Factor from raw scores to exponents of 2 where nothing stands between them. A scale of 0 becomes the
// smallest normal number: the same scores, and -inf stays -inf.
__device__ inline float log2_scale(const Params& p) {
  return fmaxf(p.softmax_scale * kLog2e, 1.17549435e-38f);
}

// ---- what a score depends on by its query ----

struct QueryRow {
  int query;
  KeyInterval band;
  KeyInterval range[2];  // read when there are ranges
  int segment;           // read when there are segment ids
  float slope;           // ALiBi; 0 without
  const void* bias;      // row of the bias
  const uint8_t* mask;   // row of the mask
};

// One head of one sequence: everything a score depends on besides s and its position.
class ScoreOfHead {
 public:
  __device__ ScoreOfHead(const Params& p, const Sequence& sequence, int head)
      : p_(p), sequence_(sequence), head_(head), n_(sequence.n) {
    const View& k_scale = p.tensor[TESSERA_K_SCALE];
    if (k_scale.data) k_scale_ = load_float(k_scale.data, offset_of(k_scale, n_, head / p.group), TESSERA_FP32);
    const View& slopes = p.tensor[TESSERA_ALIBI_SLOPES];
    if (slopes.data) slope_ = load_float(slopes.data, offset_of(slopes, n_, head), slopes.dtype);
  }

  __device__ int head() const { return head_; }
  __device__ float k_scale() const { return k_scale_; }

  __device__ QueryRow row(int query) const {
    QueryRow r{};
    r.query = query;
    r.band = keys_of_row(sequence_.band, query);
    r.slope = slope_;
    if (r.band.lo >= r.band.hi) return r;  // nothing below is read for rows that see no key
    const View& bias = p_.tensor[TESSERA_BIAS];
    if (bias.data) {
      const int64_t at = offset_of(bias, n_, head_, query);
      r.bias = static_cast<const char*>(bias.data) + at * (bias.dtype == TESSERA_FP32 ? 4 : 2);
    }
    const View& mask = p_.tensor[TESSERA_MASK];
    if (mask.data) r.mask = static_cast<const uint8_t*>(mask.data) + offset_of(mask, n_, head_, query);
    const int stored = sequence_.q.first + query;
    const View& ranges = p_.tensor[TESSERA_KEY_RANGES];
    for (int i = 0; i < p_.num_ranges; ++i) {
      const int* range = static_cast<const int*>(ranges.data) +
                         offset_of(ranges, sequence_.q.batch, head_, stored, 2 * i);
      r.range[i] = {range[0], range[ranges.stride[3]]};
    }
    const View& segments = p_.tensor[TESSERA_SEGMENT_IDS_Q];
    if (segments.data) {
      r.segment = static_cast<const int*>(
          segments.data)[offset_of(segments, sequence_.q.batch, stored)];
    }
    return r;
  }

  __device__ bool visible(const QueryRow& r, int key) const {
    if (!r.band.contains(key)) return false;
    const View& mask = p_.tensor[TESSERA_MASK];
    if (mask.data && (r.mask[key * mask.stride[3]] != 0) == ((p_.flags & TESSERA_MASK_DROP) != 0)) {
      return false;
    }
    if (p_.num_ranges == 1 && !r.range[0].contains(key)) return false;
    if (p_.num_ranges == 2 && !r.range[0].contains(key) && !r.range[1].contains(key)) return false;
    const View& segments = p_.tensor[TESSERA_SEGMENT_IDS_K];
    return !segments.data ||
           static_cast<const int*>(segments.data)[offset_of(
               segments, sequence_.k.batch, sequence_.k.first + key)] == r.segment;
  }

  // The exponent of 2 for one score; -inf when hidden. cap_slope: derivative of the softcap there.
  template <bool kPrecise>
  __device__ float exponent(float s, const QueryRow& r, int key, float& cap_slope) const {
    cap_slope = 1;
    if (!visible(r, key)) return -kInfinity;
    float bias = 0;
    const View& view = p_.tensor[TESSERA_BIAS];
    if (view.data) {
      bias = load_float(r.bias, key * view.stride[3], view.dtype);
      if (bias == -kInfinity) return bias;
    }
    s *= k_scale_;
    const bool pre_scale = (p_.flags & TESSERA_BIAS_PRE_SCALE) != 0;
    float x = p_.softmax_scale * (pre_scale ? s + bias : s);
    if (p_.flags & TESSERA_SOFTCAP) {
      const float t = hyperbolic_tangent<kPrecise>(x / p_.softcap);
      cap_slope = 1 - t * t;
      x = p_.softcap * t;
    }
    if (!pre_scale) x += bias;
    x -= r.slope * distance(r.query, key);
    return x * kLog2e;
  }

  // |i + shift - j|, what ALiBi multiplies.
  __device__ float distance(int query, int key) const {
    return fabsf(static_cast<float>(query + static_cast<int>(sequence_.band.shift) - key));
  }

  // Bits e of the fragment's values that dropout keeps; 16-aligned fragments cost one Philox call for
  // eight values.
  template <int kN, Major kMajor>
  __device__ void dropout_bits(const Dropout& dropout, int major0, int minor0,
                               uint32_t (&bits)[(kN + 63) / 64]) const;

 private:
  template <bool kPrecise>
  __device__ static float hyperbolic_tangent(float x) {
    if constexpr (kPrecise) return tanhf(x);
    return 1 - __fdividef(2.f, 1 + exp2_approx(fminf(x, 40.f) * (2 * kLog2e)));
  }

  const Params& p_;
  const Sequence& sequence_;
  int head_, n_;
  float k_scale_ = 1, slope_ = 0;
};

// ---- whole fragments ----

// Calls body(e, row, key) for each value of the fragment at (major0, minor0), rows outermost.
template <int kN, Major kMajor, typename Body>
__device__ __forceinline__ void for_each_score(const ScoreOfHead& score, int major0, int minor0,
                                               const Body& body) {
  const int major = major0 + lane_major(), minor = minor0 + lane_minor();
  if constexpr (kMajor == Major::kQueries) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const QueryRow row = score.row(major + 8 * half);
#pragma unroll
      for (int i = 0; i < kN / 4; ++i) {
        body(4 * (i / 2) + 2 * half + i % 2, row, minor + 8 * (i / 2) + i % 2);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < kN / 4; ++i) {
      const QueryRow row = score.row(minor + 8 * (i / 2) + i % 2);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        body(4 * (i / 2) + 2 * half + i % 2, row, major + 8 * half);
      }
    }
  }
}

// Hides what the band hides, for one of the thread's two rows (S) of the fragment at key0.
template <int kN>
__device__ __forceinline__ void apply_band(float (&s)[kN / 2], int half, KeyInterval keys,
                                           int key0) {
  const int lo = keys.lo - key0 - lane_minor(), hi = keys.hi - key0 - lane_minor();
#pragma unroll
  for (int i = 0; i < kN / 4; ++i) {
    const int column = 8 * (i / 2) + i % 2;
    float& value = s[4 * (i / 2) + 2 * half + i % 2];
    value = lo <= column && column < hi ? value : -kInfinity;
  }
}

// The fragment layout of Philox (core/philox.h): with both origins multiples of 16, a thread of an S
// fragment needs one call for the eight values of two neighbouring 8-column tiles. A thread of an S^T
// fragment needs halves of two calls, and the thread whose lane differs by 4 the other halves: each
// makes one call and they trade.
template <int kN, Major kMajor>
__device__ __forceinline__ void ScoreOfHead::dropout_bits(const Dropout& dropout, int major0,
                                                          int minor0,
                                                          uint32_t (&bits)[(kN + 63) / 64]) const {
  const uint32_t head_index = static_cast<uint32_t>(n_) * p_.hq + head_;
#pragma unroll
  for (int i = 0; i < (kN + 63) / 64; ++i) bits[i] = 0;
  const int lane = threadIdx.x % 32;

  if ((major0 | minor0) % 16 != 0) {  // packed heads, odd pages
#pragma unroll
    for (int e = 0; e < kN / 2; ++e) {
      const int major = major0 + lane / 4 + 8 * (e / 2 % 2);
      const int minor = minor0 + lane % 4 * 2 + 8 * (e / 4) + e % 2;
      const bool keep = kMajor == Major::kQueries ? dropout.keep(head_index, major, minor)
                                                  : dropout.keep(head_index, minor, major);
      bits[e / 32] |= static_cast<uint32_t>(keep) << (e % 32);
    }
    return;
  }

#pragma unroll
  for (int i = 0; i < kN / 16; ++i) {  // patches of 16 x 16
    const int minor16 = minor0 / 16 + i;
    uint32_t field[4];  // two 16-bit fields each: (major + 0, minor + 0 and 1), (+0, +8 and +9), (+8, ...)
    if constexpr (kMajor == Major::kQueries) {
      const Philox4 random = philox4x32_7(dropout.key0, dropout.key1, dropout.counter0, head_index,
                                          major0 / 16 * 8 + lane / 4, minor16 * 4 + lane % 4);
#pragma unroll
      for (int w = 0; w < 4; ++w) field[w] = random.word[w];
    } else {
      // Call (query r, key pair c) has words (r, c..), (r, c+8..), (r+8, c..), (r+8, c+8..). This
      // thread's keys are lane / 4 and + 8, its queries lane % 4 * 2 + {0, 1, 8, 9}: it calls for the
      // query of its key's parity.
      const int parity = lane / 4 % 2;
      const Philox4 random =
          philox4x32_7(dropout.key0, dropout.key1, dropout.counter0, head_index,
                       minor16 * 8 + lane % 4 * 2 + parity, major0 / 16 * 4 + lane / 8);
      // Halves by key parity: mine stay, the others go to the neighbour in keys.
      const uint32_t mine = parity ? 0x7632 : 0x5410, theirs = parity ? 0x5410 : 0x7632;
      const uint32_t my_q0 = __byte_perm(random.word[0], random.word[1], mine);    // query r
      const uint32_t my_q8 = __byte_perm(random.word[2], random.word[3], mine);    // query r + 8
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
      const int e = 8 * i + 4 * (w % 2) + 2 * (w / 2);  // minor + 8 is the next tile, major + 8 half 1
      const uint32_t keep_low = (field[w] & 0xFFFF) >= dropout.threshold;
      const uint32_t keep_high = field[w] >> 16 >= dropout.threshold;
      bits[e / 32] |= (keep_low | keep_high << 1) << (e % 32);
    }
  }
}

__device__ inline Dropout dropout_of(const Params& p) {
  const View& state = p.tensor[TESSERA_RNG_STATE];
  const int64_t* words = static_cast<const int64_t*>(state.data);
  return Dropout::make(words[0], words[state.stride[0]], p.dropout_threshold);
}

}  // namespace tessera::cuda
