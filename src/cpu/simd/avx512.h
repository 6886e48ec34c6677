// SPDX-License-Identifier: Apache-2.0
// AVX-512 F, BW, DQ, VL with F16C: 16 lanes, 32 registers. See types.h for what each name means.
#pragma once

#include <immintrin.h>

#include "cpu/simd/avx2.h"

namespace tessera::cpu {
namespace {

struct Avx512Narrow;

struct Avx512 {
  using Narrow = Avx512Narrow;
  using Wide = Avx512;
  static constexpr int kLanes = 16;
  static constexpr bool kNarrow = false;
  static constexpr int kRows = 8;
  static constexpr bool kHasBf16Dot = false;
  static constexpr bool kHasTiles = false;
  using F = __m512;
  using I = __m512i;
  using M = __mmask16;

  // ---- fp32 ----
  TESSERA_INLINE F zero() { return _mm512_setzero_ps(); }
  TESSERA_INLINE F set1(float x) { return _mm512_set1_ps(x); }
  TESSERA_INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
  TESSERA_INLINE F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  TESSERA_INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  TESSERA_INLINE F div(F a, F b) { return _mm512_div_ps(a, b); }
  TESSERA_INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }    // a b + c
  TESSERA_INLINE F fms(F a, F b, F c) { return _mm512_fmsub_ps(a, b, c); }    // a b - c
  TESSERA_INLINE F fnma(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a b
  TESSERA_INLINE F max(F a, F b) { return _mm512_max_ps(a, b); }
  TESSERA_INLINE F min(F a, F b) { return _mm512_min_ps(a, b); }
  TESSERA_INLINE F abs(F a) { return _mm512_abs_ps(a); }
  TESSERA_INLINE F copysign(F magnitude, F sign) {  // magnitude >= 0
    return _mm512_or_ps(magnitude, _mm512_and_ps(sign, _mm512_set1_ps(-0.0f)));
  }
  // 1/a to 2e-7 for normal a; cheaper than div.
  TESSERA_INLINE F reciprocal(F a) {
    const F r = _mm512_rcp14_ps(a);
    return mul(r, fnma(a, r, set1(2.0f)));
  }
  TESSERA_INLINE F exp2(F x) {
    const F n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const F f = sub(x, n);
    F p = fma(set1(kExp2[4]), f, set1(kExp2[3]));
    p = fma(p, f, set1(kExp2[2]));
    p = fma(p, f, set1(kExp2[1]));
    p = fma(p, f, set1(kExp2[0]));
    p = fma(p, f, set1(1.0f));
    return _mm512_scalef_ps(p, n);  // scalef(NaN, -inf) = 0, so x = -inf needs no clamp
  }
  TESSERA_INLINE F exp2_fast(F x) {
    const F n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const F f = sub(x, n);
    F p = fma(set1(kExp2Fast[2]), f, set1(kExp2Fast[1]));
    p = fma(p, f, set1(kExp2Fast[0]));
    p = fma(p, f, set1(1.0f));
    return _mm512_scalef_ps(p, n);
  }
  TESSERA_INLINE float reduce_add(F a) { return _mm512_reduce_add_ps(a); }
  TESSERA_INLINE float reduce_max(F a) { return _mm512_reduce_max_ps(a); }

  // ---- memory ----
  TESSERA_INLINE M first_lanes(int n) { return static_cast<M>((1u << n) - 1u); }  // 0 <= n <= 16

  TESSERA_INLINE F load(const float* p) { return _mm512_loadu_ps(p); }
  TESSERA_INLINE F load_n(const float* p, int n) {
    return _mm512_maskz_loadu_ps(first_lanes(n), p);
  }
  TESSERA_INLINE void store(float* p, F a) { _mm512_storeu_ps(p, a); }
  TESSERA_INLINE void store_n(float* p, F a, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), a); }
  TESSERA_INLINE F broadcast(const float* p) { return _mm512_set1_ps(*p); }

  TESSERA_INLINE F load(const Bf16* p) { return widen_bf16(load_16bit(p)); }
  TESSERA_INLINE F load_n(const Bf16* p, int n) { return widen_bf16(load_16bit_n(p, n)); }
  TESSERA_INLINE void store(Bf16* p, F a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow_bf16(a));
  }
  TESSERA_INLINE void store_n(Bf16* p, F a, int n) {
    _mm256_mask_storeu_epi16(p, first_lanes(n), narrow_bf16(a));
  }

  TESSERA_INLINE F load(const Fp16* p) { return _mm512_cvtph_ps(load_16bit(p)); }
  TESSERA_INLINE F load_n(const Fp16* p, int n) { return _mm512_cvtph_ps(load_16bit_n(p, n)); }
  TESSERA_INLINE void store(Fp16* p, F a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow_fp16(a));
  }
  TESSERA_INLINE void store_n(Fp16* p, F a, int n) {
    _mm256_mask_storeu_epi16(p, first_lanes(n), narrow_fp16(a));
  }

  TESSERA_INLINE F load(const E4m3* p) { return widen_e4m3(load_8bit(p)); }
  TESSERA_INLINE F load_n(const E4m3* p, int n) { return widen_e4m3(load_8bit_n(p, n)); }
  TESSERA_INLINE F load(const E5m2* p) { return widen_e5m2(load_8bit(p)); }
  TESSERA_INLINE F load_n(const E5m2* p, int n) { return widen_e5m2(load_8bit_n(p, n)); }

  static constexpr bool kStreams = true;
  TESSERA_INLINE void stream(float* p, F a) { _mm512_stream_ps(p, a); }
  TESSERA_INLINE void stream(Bf16* p, F a, F b) { stream_pair(p, narrow_bf16(a), narrow_bf16(b)); }
  TESSERA_INLINE void stream(Fp16* p, F a, F b) { stream_pair(p, narrow_fp16(a), narrow_fp16(b)); }
  TESSERA_INLINE void end_streams() { _mm_sfence(); }

  // Bit i: p[i] != 0, for i < n <= 32; bytes from the n-th on are not read.
  TESSERA_INLINE uint32_t nonzero_bytes(const uint8_t* p, int n) {
    const __mmask32 lanes = n >= 32 ? ~__mmask32{0} : (__mmask32{1} << n) - 1;
    const __m256i bytes = _mm256_maskz_loadu_epi8(lanes, p);
    return _mm256_test_epi8_mask(bytes, bytes);
  }

  // ---- int32 ----
  TESSERA_INLINE I set1i(int32_t x) { return _mm512_set1_epi32(x); }
  TESSERA_INLINE I iota() {
    return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  }
  TESSERA_INLINE I load(const int32_t* p) { return _mm512_loadu_si512(p); }
  TESSERA_INLINE void store(int32_t* p, I a) { _mm512_storeu_si512(p, a); }
  TESSERA_INLINE I add(I a, I b) { return _mm512_add_epi32(a, b); }
  TESSERA_INLINE I sub(I a, I b) { return _mm512_sub_epi32(a, b); }
  TESSERA_INLINE I max(I a, I b) { return _mm512_max_epi32(a, b); }
  TESSERA_INLINE I min(I a, I b) { return _mm512_min_epi32(a, b); }
  TESSERA_INLINE I bit_and(I a, I b) { return _mm512_and_si512(a, b); }
  TESSERA_INLINE I bit_or(I a, I b) { return _mm512_or_si512(a, b); }
  TESSERA_INLINE I xor3(I a, I b, I c) { return _mm512_ternarylogic_epi32(a, b, c, 0x96); }
  template <int kBits>
  TESSERA_INLINE I shift_right(I a) {  // logical
    return _mm512_srli_epi32(a, kBits);
  }
  TESSERA_INLINE I shift_left(I a, I count) { return _mm512_sllv_epi32(a, count); }  // 0 past 31
  TESSERA_INLINE void mul_wide(I a, I b, I& high, I& low) {
    const I even = _mm512_mul_epu32(a, b);
    const I odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), _mm512_srli_epi64(b, 32));
    high = _mm512_mask_shuffle_epi32(odd, 0x5555, even, static_cast<_MM_PERM_ENUM>(0xF5));
    low = _mm512_mask_shuffle_epi32(even, 0xAAAA, odd, static_cast<_MM_PERM_ENUM>(0xA0));
  }
  // sum with `bit` added in the 16-bit halves where words >= threshold, unsigned.
  TESSERA_INLINE I add_where_not_less(I sum, I words, I threshold, I bit) {
    return _mm512_mask_add_epi16(sum, _mm512_cmpge_epu16_mask(words, threshold), sum, bit);
  }
  TESSERA_INLINE F to_float(I a) { return _mm512_cvtepi32_ps(a); }
  TESSERA_INLINE I as_int(F a) { return _mm512_castps_si512(a); }
  TESSERA_INLINE F as_float(I a) { return _mm512_castsi512_ps(a); }
  TESSERA_INLINE void interleave_halves(I a, I b, I& first, I& second) {
    first = _mm512_shuffle_i64x2(a, b, 0x44);
    second = _mm512_shuffle_i64x2(a, b, 0xEE);
  }

  // ---- predicates ----
  TESSERA_INLINE M test_bit(I words, I bit) { return _mm512_test_epi32_mask(words, bit); }
  TESSERA_INLINE M less(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
  TESSERA_INLINE M equal(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
  TESSERA_INLINE M less(I a, I b) { return _mm512_cmplt_epi32_mask(a, b); }
  TESSERA_INLINE M equal(I a, I b) { return _mm512_cmpeq_epi32_mask(a, b); }
  TESSERA_INLINE F select(M m, F a, F b) { return _mm512_mask_blend_ps(m, b, a); }
  TESSERA_INLINE I select(M m, I a, I b) { return _mm512_mask_blend_epi32(m, b, a); }
  TESSERA_INLINE bool any(M m) { return m != 0; }

  // ---- x[i][j] <-> x[j][i] ----
  TESSERA_INLINE void transpose(F (&x)[kLanes]) {
    F t[kLanes];
    for (int i = 0; i < 16; i += 4) {  // 4x4 inside each 128-bit lane
      const F a = _mm512_unpacklo_ps(x[i], x[i + 1]), b = _mm512_unpackhi_ps(x[i], x[i + 1]);
      const F c = _mm512_unpacklo_ps(x[i + 2], x[i + 3]),
              d = _mm512_unpackhi_ps(x[i + 2], x[i + 3]);
      t[i] = pair_low(a, c), t[i + 1] = pair_high(a, c);
      t[i + 2] = pair_low(b, d), t[i + 3] = pair_high(b, d);
    }
    for (int i = 0; i < 4; ++i) {  // then 4x4 of 128-bit lanes
      const F a = _mm512_shuffle_f32x4(t[i], t[i + 4], 0x88);
      const F b = _mm512_shuffle_f32x4(t[i], t[i + 4], 0xDD);
      const F c = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0x88);
      const F d = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0xDD);
      x[i] = _mm512_shuffle_f32x4(a, c, 0x88), x[i + 8] = _mm512_shuffle_f32x4(a, c, 0xDD);
      x[i + 4] = _mm512_shuffle_f32x4(b, d, 0x88), x[i + 12] = _mm512_shuffle_f32x4(b, d, 0xDD);
    }
  }

 private:
  TESSERA_INLINE F pair_low(F a, F b) {
    return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
  }
  TESSERA_INLINE F pair_high(F a, F b) {
    return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
  }
  TESSERA_INLINE __m256i load_16bit(const void* p) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(p));
  }
  TESSERA_INLINE __m256i load_16bit_n(const void* p, int n) {
    return _mm256_maskz_loadu_epi16(first_lanes(n), p);
  }
  TESSERA_INLINE void stream_pair(void* p, __m256i a, __m256i b) {
    _mm512_stream_si512(static_cast<__m512i*>(p),
                        _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1));
  }
  TESSERA_INLINE __m128i load_8bit(const void* p) {
    return _mm_loadu_si128(static_cast<const __m128i*>(p));
  }
  TESSERA_INLINE __m128i load_8bit_n(const void* p, int n) {
    return _mm_maskz_loadu_epi8(first_lanes(n), p);
  }
  TESSERA_INLINE F widen_bf16(__m256i a) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(a), 16));
  }
  TESSERA_INLINE __m256i narrow_bf16(F a) {
    const I bits = _mm512_castps_si512(a);
    const I odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), set1i(1));
    const I rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, set1i(0x7FFF)));
    const I quiet = _mm512_or_si512(bits, set1i(0x400000));
    const M nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, nan, quiet), 16));
  }
  TESSERA_INLINE __m256i narrow_fp16(F a) {
    return _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  TESSERA_INLINE F widen_e4m3(__m128i bytes) {
    const __m256i a = _mm256_cvtepu8_epi16(bytes);
    const __m256i magnitude = _mm256_and_si256(a, _mm256_set1_epi16(0x7F));
    const __m256i sign = _mm256_slli_epi16(_mm256_sub_epi16(a, magnitude), 8);
    const __m256i half = _mm256_or_si256(sign, _mm256_slli_epi16(magnitude, 7));
    const M nan = _mm256_cmpeq_epi16_mask(magnitude, _mm256_set1_epi16(0x7F));
    const F wide = mul(_mm512_cvtph_ps(half), set1(kE4m3Scale));
    return _mm512_mask_mov_ps(wide, nan, set1(__builtin_nanf("")));
  }
  TESSERA_INLINE F widen_e5m2(__m128i bytes) {  // the upper byte of an fp16
    return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 8));
  }
};

// 8 lanes for decode of at most 8 rows: half the width, and on machines that run 512-bit operations
// in two halves twice the rate. Twice the registers of plain AVX2.
struct Avx512Narrow : Avx2 {
  using Narrow = Avx512Narrow;
  using Wide = Avx512;
  static constexpr int kRows = 8;
  static constexpr bool kNarrow = true;
};

}  // namespace
}  // namespace tessera::cpu
