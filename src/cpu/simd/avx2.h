// SPDX-License-Identifier: Apache-2.0
// AVX2 with FMA and F16C: 8 lanes, 16 registers. See types.h for what each name means.
#pragma once

#include <immintrin.h>

#include "cpu/simd/types.h"

namespace tessera::cpu {
namespace {

struct Avx2 {
  using Narrow = Avx2;
  using Wide = Avx2;
  static constexpr bool kNarrow = false;
  static constexpr int kLanes = 8;
  static constexpr int kRows =
      6;  // 6x2 sums, 2 vectors of queries and 1 broadcast: 15 of 16 registers
  static constexpr bool kHasBf16Dot = false;
  static constexpr bool kHasTiles = false;
  static constexpr bool kStreams = false;
  using F = __m256;
  using I = __m256i;
  using M = __m256i;  // all bits of a lane

  // ---- fp32 ----
  TESSERA_INLINE F zero() { return _mm256_setzero_ps(); }
  TESSERA_INLINE F set1(float x) { return _mm256_set1_ps(x); }
  TESSERA_INLINE F add(F a, F b) { return _mm256_add_ps(a, b); }
  TESSERA_INLINE F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  TESSERA_INLINE F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  TESSERA_INLINE F div(F a, F b) { return _mm256_div_ps(a, b); }
  TESSERA_INLINE F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  TESSERA_INLINE F fms(F a, F b, F c) { return _mm256_fmsub_ps(a, b, c); }
  TESSERA_INLINE F fnma(F a, F b, F c) { return _mm256_fnmadd_ps(a, b, c); }
  TESSERA_INLINE F max(F a, F b) { return _mm256_max_ps(a, b); }
  TESSERA_INLINE F min(F a, F b) { return _mm256_min_ps(a, b); }
  TESSERA_INLINE F abs(F a) { return _mm256_andnot_ps(set1(-0.0f), a); }
  TESSERA_INLINE F copysign(F magnitude, F sign) {
    return _mm256_or_ps(magnitude, _mm256_and_ps(sign, set1(-0.0f)));
  }
  TESSERA_INLINE F reciprocal(F a) { return div(set1(1.0f), a); }
  TESSERA_INLINE F exp2(F x) {
    const F n = rounded(x);
    const F f = sub(bounded(x), n);
    F p = fma(set1(kExp2[4]), f, set1(kExp2[3]));
    p = fma(p, f, set1(kExp2[2]));
    p = fma(p, f, set1(kExp2[1]));
    p = fma(p, f, set1(kExp2[0]));
    return mul(fma(p, f, set1(1.0f)), power_of_2(n));
  }
  TESSERA_INLINE F exp2_fast(F x) {
    const F n = rounded(x);
    const F f = sub(bounded(x), n);
    F p = fma(set1(kExp2Fast[2]), f, set1(kExp2Fast[1]));
    p = fma(p, f, set1(kExp2Fast[0]));
    return mul(fma(p, f, set1(1.0f)), power_of_2(n));
  }
  TESSERA_INLINE float reduce_add(F a) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
  }
  TESSERA_INLINE float reduce_max(F a) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
  }

  // ---- memory ----
  TESSERA_INLINE M first_lanes(int n) { return _mm256_cmpgt_epi32(set1i(n), iota()); }

  TESSERA_INLINE F load(const float* p) { return _mm256_loadu_ps(p); }
  TESSERA_INLINE F load_n(const float* p, int n) { return _mm256_maskload_ps(p, first_lanes(n)); }
  TESSERA_INLINE void store(float* p, F a) { _mm256_storeu_ps(p, a); }
  TESSERA_INLINE void store_n(float* p, F a, int n) { _mm256_maskstore_ps(p, first_lanes(n), a); }
  TESSERA_INLINE F broadcast(const float* p) { return _mm256_broadcast_ss(p); }

  TESSERA_INLINE F load(const Bf16* p) { return widen_bf16(load_16bit(p)); }
  TESSERA_INLINE F load_n(const Bf16* p, int n) { return widen_bf16(load_16bit_n(p, n)); }
  TESSERA_INLINE void store(Bf16* p, F a) { store_16bit_n(p, narrow_bf16(a), kLanes); }
  TESSERA_INLINE void store_n(Bf16* p, F a, int n) { store_16bit_n(p, narrow_bf16(a), n); }

  TESSERA_INLINE F load(const Fp16* p) { return _mm256_cvtph_ps(load_16bit(p)); }
  TESSERA_INLINE F load_n(const Fp16* p, int n) { return _mm256_cvtph_ps(load_16bit_n(p, n)); }
  TESSERA_INLINE void store(Fp16* p, F a) { store_16bit_n(p, narrow_fp16(a), kLanes); }
  TESSERA_INLINE void store_n(Fp16* p, F a, int n) { store_16bit_n(p, narrow_fp16(a), n); }

  TESSERA_INLINE F load(const E4m3* p) { return load_n(p, kLanes); }
  TESSERA_INLINE F load_n(const E4m3* p, int n) {
    const __m128i a = load_8bit_n(p, n);
    const __m128i magnitude = _mm_and_si128(a, _mm_set1_epi16(0x7F));
    const __m128i sign = _mm_slli_epi16(_mm_sub_epi16(a, magnitude), 8);
    const __m128i half = _mm_or_si128(sign, _mm_slli_epi16(magnitude, 7));
    const F wide = mul(_mm256_cvtph_ps(half), set1(kE4m3Scale));
    const M nan = _mm256_cvtepi16_epi32(_mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x7F)));
    return select(nan, set1(__builtin_nanf("")), wide);
  }
  TESSERA_INLINE F load(const E5m2* p) { return load_n(p, kLanes); }
  TESSERA_INLINE F load_n(const E5m2* p, int n) {
    return _mm256_cvtph_ps(_mm_slli_epi16(load_8bit_n(p, n), 8));
  }

  // Bit i: p[i] != 0, for i < n <= 32; bytes from the n-th on are not read.
  TESSERA_INLINE uint32_t nonzero_bytes(const uint8_t* p, int n) {
    alignas(32) uint8_t bytes[32] = {};
    const __m256i a = n < 32 ? (memcpy(bytes, p, static_cast<size_t>(n)),
                                _mm256_load_si256(reinterpret_cast<const __m256i*>(bytes)))
                             : _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m256i hidden = _mm256_cmpeq_epi8(a, _mm256_setzero_si256());
    return ~static_cast<uint32_t>(_mm256_movemask_epi8(hidden));
  }

  // ---- int32 ----
  TESSERA_INLINE I set1i(int32_t x) { return _mm256_set1_epi32(x); }
  TESSERA_INLINE I iota() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
  TESSERA_INLINE I load(const int32_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  TESSERA_INLINE void store(int32_t* p, I a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a);
  }
  TESSERA_INLINE I add(I a, I b) { return _mm256_add_epi32(a, b); }
  TESSERA_INLINE I sub(I a, I b) { return _mm256_sub_epi32(a, b); }
  TESSERA_INLINE I max(I a, I b) { return _mm256_max_epi32(a, b); }
  TESSERA_INLINE I min(I a, I b) { return _mm256_min_epi32(a, b); }
  TESSERA_INLINE I bit_and(I a, I b) { return _mm256_and_si256(a, b); }
  TESSERA_INLINE I bit_or(I a, I b) { return _mm256_or_si256(a, b); }
  TESSERA_INLINE I xor3(I a, I b, I c) { return _mm256_xor_si256(_mm256_xor_si256(a, b), c); }
  template <int kBits>
  TESSERA_INLINE I shift_right(I a) {
    return _mm256_srli_epi32(a, kBits);
  }
  TESSERA_INLINE I shift_left(I a, I count) { return _mm256_sllv_epi32(a, count); }
  TESSERA_INLINE void mul_wide(I a, I b, I& high, I& low) {
    const I even = _mm256_mul_epu32(a, b);
    const I odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), _mm256_srli_epi64(b, 32));
    high = _mm256_blend_epi32(_mm256_shuffle_epi32(even, 0xF5), odd, 0xAA);
    low = _mm256_blend_epi32(even, _mm256_shuffle_epi32(odd, 0xA0), 0xAA);
  }
  // sum with `bit` added in the 16-bit halves where words >= threshold, unsigned.
  TESSERA_INLINE I add_where_not_less(I sum, I words, I threshold, I bit) {
    const I not_less = _mm256_cmpeq_epi16(_mm256_max_epu16(words, threshold), words);
    return _mm256_add_epi16(sum, bit_and(not_less, bit));
  }
  TESSERA_INLINE F to_float(I a) { return _mm256_cvtepi32_ps(a); }
  TESSERA_INLINE I as_int(F a) { return _mm256_castps_si256(a); }
  TESSERA_INLINE F as_float(I a) { return _mm256_castsi256_ps(a); }
  TESSERA_INLINE void interleave_halves(I a, I b, I& first, I& second) { first = a, second = b; }

  // ---- predicates ----
  TESSERA_INLINE M test_bit(I words, I bit) {  // bit has one bit set
    return _mm256_cmpeq_epi32(bit_and(words, bit), bit);
  }
  TESSERA_INLINE M less(F a, F b) { return as_int(_mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
  TESSERA_INLINE M equal(F a, F b) { return as_int(_mm256_cmp_ps(a, b, _CMP_EQ_OQ)); }
  TESSERA_INLINE M less(I a, I b) { return _mm256_cmpgt_epi32(b, a); }
  TESSERA_INLINE M equal(I a, I b) { return _mm256_cmpeq_epi32(a, b); }
  TESSERA_INLINE F select(M m, F a, F b) { return _mm256_blendv_ps(b, a, as_float(m)); }
  TESSERA_INLINE I select(M m, I a, I b) { return _mm256_blendv_epi8(b, a, m); }
  TESSERA_INLINE bool any(M m) { return _mm256_movemask_ps(as_float(m)) != 0; }

  // ---- x[i][j] <-> x[j][i] ----
  TESSERA_INLINE void transpose(F (&x)[kLanes]) {
    F t[kLanes];
    for (int i = 0; i < 8; i += 4) {  // 4x4 inside each 128-bit half
      const F a = _mm256_unpacklo_ps(x[i], x[i + 1]), b = _mm256_unpackhi_ps(x[i], x[i + 1]);
      const F c = _mm256_unpacklo_ps(x[i + 2], x[i + 3]),
              d = _mm256_unpackhi_ps(x[i + 2], x[i + 3]);
      t[i] = _mm256_shuffle_ps(a, c, 0x44), t[i + 1] = _mm256_shuffle_ps(a, c, 0xEE);
      t[i + 2] = _mm256_shuffle_ps(b, d, 0x44), t[i + 3] = _mm256_shuffle_ps(b, d, 0xEE);
    }
    for (int i = 0; i < 4; ++i) {
      x[i] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x20);
      x[i + 4] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x31);
    }
  }

 private:
  // The result is 0 or infinity beyond [-127, 128] anyway; NaN passes (second operand of max, min).
  TESSERA_INLINE F bounded(F x) { return min(set1(128.0f), max(set1(-127.0f), x)); }
  TESSERA_INLINE F rounded(F x) {
    return _mm256_round_ps(bounded(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  TESSERA_INLINE F power_of_2(F n) {  // 0 for n = -127
    return as_float(_mm256_slli_epi32(add(_mm256_cvtps_epi32(n), set1i(127)), 23));
  }
  TESSERA_INLINE __m128i load_16bit(const void* p) {
    return _mm_loadu_si128(static_cast<const __m128i*>(p));
  }
  TESSERA_INLINE __m128i load_16bit_n(const void* p, int n) {
    alignas(16) uint16_t words[kLanes] = {};
    memcpy(words, p, static_cast<size_t>(n) * 2);
    return _mm_load_si128(reinterpret_cast<const __m128i*>(words));
  }
  TESSERA_INLINE void store_16bit_n(void* p, __m128i a, int n) {
    alignas(16) uint16_t words[kLanes];
    _mm_store_si128(reinterpret_cast<__m128i*>(words), a);
    memcpy(p, words, static_cast<size_t>(n) * 2);
  }
  TESSERA_INLINE __m128i load_8bit_n(const void* p, int n) {  // as 16-bit words
    uint64_t bytes = 0;
    memcpy(&bytes, p, static_cast<size_t>(n));
    return _mm_cvtepu8_epi16(_mm_cvtsi64_si128(static_cast<int64_t>(bytes)));
  }
  TESSERA_INLINE F widen_bf16(__m128i a) {
    return as_float(_mm256_slli_epi32(_mm256_cvtepu16_epi32(a), 16));
  }
  TESSERA_INLINE __m128i narrow_bf16(F a) {
    const I bits = as_int(a);
    const I odd = bit_and(shift_right<16>(bits), set1i(1));
    const I rounded = add(bits, add(odd, set1i(0x7FFF)));
    const I quiet = bit_or(bits, set1i(0x400000));
    const M nan = as_int(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    const I words = shift_right<16>(select(nan, quiet, rounded));
    return _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  }
  TESSERA_INLINE __m128i narrow_fp16(F a) {
    return _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
};

}  // namespace
}  // namespace tessera::cpu
