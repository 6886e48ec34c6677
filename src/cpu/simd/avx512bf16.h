// SPDX-License-Identifier: Apache-2.0
// AVX-512 with AVX512_BF16: vdpbf16ps multiplies twice as many bf16 as fp32 a cycle. It flushes
// subnormal inputs and results whatever MXCSR says, and rounds after each product.
#pragma once

#include "cpu/simd/avx512.h"
#include "cpu/simd/kernels.h"

namespace tessera::cpu {

extern const Kernels kAvx512Kernels;

namespace {

struct Avx512Bf16Narrow;

struct Avx512Bf16 : Avx512 {
  using Narrow = Avx512Bf16Narrow;
  using Wide = Avx512Bf16;
  static constexpr bool kHasBf16Dot = true;
  static const Kernels& below() { return kAvx512Kernels; }
  using Pairs = __m512i;  // a lane holds two bf16: an even index in the low half, the next above it

  TESSERA_INLINE Pairs load_pairs(const uint32_t* p) { return _mm512_loadu_si512(p); }
  TESSERA_INLINE void store_pairs(uint32_t* p, Pairs a) { _mm512_storeu_si512(p, a); }
  TESSERA_INLINE Pairs zero_pairs() { return _mm512_setzero_si512(); }

  // Elements p[0] and p[1], at any 2-byte alignment, in every lane; broadcast_half: p[0] and 0.
  TESSERA_INLINE Pairs broadcast_pair(const Bf16* p) {
    int32_t word;
    memcpy(&word, p, sizeof word);
    return _mm512_set1_epi32(word);
  }
  TESSERA_INLINE Pairs broadcast_half(const Bf16* p) { return _mm512_set1_epi32(p->bits); }

  // Elements p[0] to p[3] in every two lanes, or to p[7] in every four; one word in every lane.
  TESSERA_INLINE Pairs broadcast_four(const Bf16* p) {
    int64_t words;
    memcpy(&words, p, sizeof words);
    return _mm512_set1_epi64(words);
  }
  TESSERA_INLINE Pairs broadcast_eight(const Bf16* p) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  TESSERA_INLINE Pairs broadcast_word(const uint32_t* p) {
    return _mm512_set1_epi32(static_cast<int32_t>(*p));
  }

  TESSERA_INLINE F dot(F sum, Pairs a, Pairs b) {
    return _mm512_dpbf16_ps(sum, as_bf16(a), as_bf16(b));
  }
  // (a0 + a1, a2 + a3, ..., b0 + b1, b2 + b3, ...)
  TESSERA_INLINE F add_neighbours(F a, F b) {
    const F even = _mm512_shuffle_ps(a, b, 0x88), odd = _mm512_shuffle_ps(a, b, 0xDD);
    const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    return _mm512_castpd_ps(
        _mm512_permutexvar_pd(order, _mm512_castps_pd(_mm512_add_ps(even, odd))));
  }

  // (a0 ... a3, a0 ... a3, a4 ... a7, a4 ... a7) and the same of the upper half.
  TESSERA_INLINE void repeat_fours(F a, F& low, F& high) {
    low = _mm512_shuffle_f32x4(a, a, 0x50), high = _mm512_shuffle_f32x4(a, a, 0xFA);
  }

  // rows[first ... last), of n bytes each, as bf16 in `to`, step elements apart, to which they then
  // lead; one at `zeros` stays. Magnitudes by tables of 128 low and high bytes, and the sign. Needs
  // VBMI, which host code asks for (has_byte_tables).
  __attribute__((target("avx512vbmi"), noinline)) static void widen_bytes(
      const char** rows, const char* zeros, int first, int last, int64_t n, const uint8_t* low,
      const uint8_t* high, Bf16* to, int64_t step) {
    const __m512i low_a = _mm512_load_si512(low), low_b = _mm512_load_si512(low + 64);
    const __m512i high_a = _mm512_load_si512(high), high_b = _mm512_load_si512(high + 64);
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);  // undone by interleaving
    for (int j = first; j < last; ++j) {
      if (rows[j] == zeros) continue;
      Bf16* row = to + j * step;
      for (int64_t d = 0; d < n; d += 64) {
        const uint64_t left = n - d >= 64 ? ~uint64_t{0} : (uint64_t{1} << (n - d)) - 1;
        const __m512i bytes =
            _mm512_permutexvar_epi64(order, _mm512_maskz_loadu_epi8(left, rows[j] + d));
        const __m512i l = _mm512_permutex2var_epi8(low_a, bytes, low_b);
        const __m512i h = _mm512_ternarylogic_epi32(_mm512_permutex2var_epi8(high_a, bytes, high_b),
                                                    bytes, _mm512_set1_epi8(-128), 0xF8);
        _mm512_mask_storeu_epi16(row + d, static_cast<__mmask32>(left), _mm512_unpacklo_epi8(l, h));
        _mm512_mask_storeu_epi16(row + d + 32, static_cast<__mmask32>(left >> 32),
                                 _mm512_unpackhi_epi8(l, h));
      }
      rows[j] = reinterpret_cast<const char*>(row);
    }
  }

  // Lane l: (bf16(even[l]), bf16(odd[l])).
  TESSERA_INLINE Pairs make_pairs(F even, F odd) {
    const __m512i low_then_high = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(odd, even));
    return _mm512_permutexvar_epi16(interleave_index(), low_then_high);
  }

  // (first, second), 2 kLanes elements, as a row of bf16: pairs along the row.
  TESSERA_INLINE Pairs narrow_row(F first, F second) {
    return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first));
  }

  // kLanes elements of rows a and b, interleaved into 2 kLanes 16-bit values: (a0 b0 a1 b1 ...).
  // n < kLanes: elements from the n-th on are not read and come out as 0.
  TESSERA_INLINE Pairs interleave_rows(const Bf16* a, const Bf16* b) {
    return interleave(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(a)),
                      _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b)));
  }
  TESSERA_INLINE Pairs interleave_rows_n(const Bf16* a, const Bf16* b, int n) {
    return interleave(_mm256_maskz_loadu_epi16(first_lanes(n), a),
                      _mm256_maskz_loadu_epi16(first_lanes(n), b));
  }

  // Rows of 2 kLanes elements, interleaved: of each 8, the first four into low, the others into
  // high.
  TESSERA_INLINE void interleave_fours(Pairs a, Pairs b, Pairs& low, Pairs& high) {
    low = _mm512_unpacklo_epi16(a, b), high = _mm512_unpackhi_epi16(a, b);
  }

  // 2 kLanes elements of a row as they lie: pairs along the row. n elements are read, others are 0.
  TESSERA_INLINE Pairs load_row(const Bf16* p) { return _mm512_loadu_si512(p); }
  TESSERA_INLINE Pairs load_row_n(const Bf16* p, int n) {
    const __mmask32 lanes = n >= 32 ? ~__mmask32{0} : (__mmask32{1} << n) - 1;
    return _mm512_maskz_loadu_epi16(lanes, p);
  }

 private:
  TESSERA_INLINE __m512bh as_bf16(Pairs a) { return reinterpret_cast<__m512bh>(a); }
  TESSERA_INLINE __m512i interleave(__m256i a, __m256i b) {
    return _mm512_permutexvar_epi16(interleave_index(),
                                    _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1));
  }
  TESSERA_INLINE __m512i interleave_index() {  // 0, 16, 1, 17, ...
    return _mm512_add_epi32(_mm512_mullo_epi32(iota(), set1i(0x10001)), set1i(0x100000));
  }
};

// Pairs are P alone: see decode/group.h.
struct Avx512Bf16Narrow : Avx512Narrow {
  using Narrow = Avx512Bf16Narrow;
  using Wide = Avx512Bf16;
  static constexpr bool kHasBf16Dot = true;
  using Pairs = __m256i;

  TESSERA_INLINE void store_pairs(uint32_t* p, Pairs a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a);
  }
  TESSERA_INLINE Pairs make_pairs(F even, F odd) {
    const __m256i low_then_high = reinterpret_cast<__m256i>(_mm256_cvtne2ps_pbh(odd, even));
    const __m256i low = _mm256_permute4x64_epi64(low_then_high, 0x10);  // quadwords 0, -, 1, -
    const __m256i high = _mm256_permute4x64_epi64(low_then_high, 0x32);
    return _mm256_unpacklo_epi16(low, high);
  }
};

}  // namespace
}  // namespace tessera::cpu
