// SPDX-License-Identifier: Apache-2.0
// Any machine with GCC's or Clang's vector extension: 4 lanes, which is what SSE2 and NEON have.
// See types.h for what each name means.
#pragma once

#include "cpu/simd/types.h"

namespace tessera::cpu {
namespace {

struct Portable {
  using Narrow = Portable;
  using Wide = Portable;
  static constexpr bool kNarrow = false;
  static constexpr int kLanes = 4;
#if defined(__aarch64__)
  static constexpr int kRows = 8;  // 16 sums of 32 registers
#else
  static constexpr int kRows = 4;  // 8 sums of 16 registers; SSE2 has no broadcasting load
#endif
  static constexpr bool kHasBf16Dot = false;
  static constexpr bool kHasTiles = false;
  static constexpr bool kStreams = false;
  typedef float F __attribute__((vector_size(16)));
  typedef int32_t I __attribute__((vector_size(16)));
  using M = I;  // all bits of a lane

  // ---- fp32 ----
  TESSERA_INLINE F zero() { return F{}; }
  TESSERA_INLINE F set1(float x) { return F{x, x, x, x}; }
  TESSERA_INLINE F add(F a, F b) { return a + b; }
  TESSERA_INLINE F sub(F a, F b) { return a - b; }
  TESSERA_INLINE F mul(F a, F b) { return a * b; }
  TESSERA_INLINE F div(F a, F b) { return a / b; }
  TESSERA_INLINE F fma(F a, F b, F c) { return a * b + c; }  // fused where the machine can
  TESSERA_INLINE F fms(F a, F b, F c) { return rounded_once(a, b, -c); }
  TESSERA_INLINE F fnma(F a, F b, F c) { return rounded_once(-a, b, c); }
  TESSERA_INLINE F max(F a, F b) { return select(a > b, a, b); }
  TESSERA_INLINE F min(F a, F b) { return select(a < b, a, b); }
  TESSERA_INLINE F abs(F a) { return as_float(as_int(a) & set1i(0x7FFFFFFF)); }
  TESSERA_INLINE F copysign(F magnitude, F sign) {
    return as_float(as_int(magnitude) | (as_int(sign) & set1i(INT32_MIN)));
  }
  TESSERA_INLINE F reciprocal(F a) { return set1(1.0f) / a; }
  TESSERA_INLINE F exp2(F x) {
    const F bound = bounded(x), n = rounded(bound), f = bound - n;
    F p = fma(set1(kExp2[4]), f, set1(kExp2[3]));
    p = fma(p, f, set1(kExp2[2]));
    p = fma(p, f, set1(kExp2[1]));
    p = fma(p, f, set1(kExp2[0]));
    return fma(p, f, set1(1.0f)) * power_of_2(n);
  }
  TESSERA_INLINE F exp2_fast(F x) {
    const F bound = bounded(x), n = rounded(bound), f = bound - n;
    F p = fma(set1(kExp2Fast[2]), f, set1(kExp2Fast[1]));
    p = fma(p, f, set1(kExp2Fast[0]));
    return fma(p, f, set1(1.0f)) * power_of_2(n);
  }
  TESSERA_INLINE float reduce_add(F a) { return (a[0] + a[2]) + (a[1] + a[3]); }
  TESSERA_INLINE float reduce_max(F a) {
    const float x = a[0] > a[2] ? a[0] : a[2], y = a[1] > a[3] ? a[1] : a[3];
    return x > y ? x : y;
  }

  // ---- memory ----
  TESSERA_INLINE M first_lanes(int n) { return iota() < set1i(n); }

  TESSERA_INLINE F load(const float* p) {
    F a;
    memcpy(&a, p, sizeof a);
    return a;
  }
  TESSERA_INLINE F load_n(const float* p, int n) {
    F a{};
    for (int l = 0; l < n; ++l) a[l] = p[l];
    return a;
  }
  TESSERA_INLINE void store(float* p, F a) { memcpy(p, &a, sizeof a); }
  TESSERA_INLINE void store_n(float* p, F a, int n) {
    for (int l = 0; l < n; ++l) p[l] = a[l];
  }
  TESSERA_INLINE F broadcast(const float* p) { return set1(*p); }

  TESSERA_INLINE F load(const Bf16* p) { return load_n(p, kLanes); }
  TESSERA_INLINE F load_n(const Bf16* p, int n) {
    I a{};
    for (int l = 0; l < n; ++l) a[l] = static_cast<int32_t>(uint32_t{p[l].bits} << 16);
    return as_float(a);
  }
  TESSERA_INLINE void store(Bf16* p, F a) { store_n(p, a, kLanes); }
  TESSERA_INLINE void store_n(Bf16* p, F a, int n) {
    const I bits = as_int(a);
    const I rounded = bits + (shift_right<16>(bits) & set1i(1)) + set1i(0x7FFF);
    const I words = shift_right<16>(select(a == a, rounded, bits | set1i(0x400000)));
    for (int l = 0; l < n; ++l) p[l].bits = static_cast<uint16_t>(words[l]);
  }

  TESSERA_INLINE F load(const Fp16* p) { return load_n(p, kLanes); }
  TESSERA_INLINE F load_n(const Fp16* p, int n) {
    I a{};
    for (int l = 0; l < n; ++l) a[l] = p[l].bits;
    return widen_fp16(a);
  }
  TESSERA_INLINE void store(Fp16* p, F a) { store_n(p, a, kLanes); }
  TESSERA_INLINE void store_n(Fp16* p, F a, int n) {
    for (int l = 0; l < n; ++l) p[l].bits = narrow_fp16(a[l]);
  }

  TESSERA_INLINE F load(const E4m3* p) { return load_n(p, kLanes); }
  TESSERA_INLINE F load_n(const E4m3* p, int n) {
    I a{};
    for (int l = 0; l < n; ++l) a[l] = p[l].bits;
    const I magnitude = a & set1i(0x7F);
    const F wide = widen_fp16(((a & set1i(0x80)) << 8) | (magnitude << 7)) * set1(kE4m3Scale);
    return select(magnitude == set1i(0x7F), set1(__builtin_nanf("")), wide);
  }
  TESSERA_INLINE F load(const E5m2* p) { return load_n(p, kLanes); }
  TESSERA_INLINE F load_n(const E5m2* p, int n) {
    I a{};
    for (int l = 0; l < n; ++l) a[l] = int32_t{p[l].bits} << 8;
    return widen_fp16(a);
  }

  // Bit i: p[i] != 0, for i < n <= 32; bytes from the n-th on are not read.
  TESSERA_INLINE uint32_t nonzero_bytes(const uint8_t* p, int n) {
    uint32_t bits = 0;
    for (int i = 0; i < n; ++i) bits |= static_cast<uint32_t>(p[i] != 0) << i;
    return bits;
  }

  // ---- int32 ----
  TESSERA_INLINE I set1i(int32_t x) { return I{x, x, x, x}; }
  TESSERA_INLINE I iota() { return I{0, 1, 2, 3}; }
  TESSERA_INLINE I load(const int32_t* p) {
    I a;
    memcpy(&a, p, sizeof a);
    return a;
  }
  TESSERA_INLINE void store(int32_t* p, I a) { memcpy(p, &a, sizeof a); }
  TESSERA_INLINE I add(I a, I b) { return reinterpret_cast<I>(unsigned_of(a) + unsigned_of(b)); }
  TESSERA_INLINE I sub(I a, I b) { return reinterpret_cast<I>(unsigned_of(a) - unsigned_of(b)); }
  TESSERA_INLINE I max(I a, I b) { return select(a > b, a, b); }
  TESSERA_INLINE I min(I a, I b) { return select(a < b, a, b); }
  TESSERA_INLINE I bit_and(I a, I b) { return a & b; }
  TESSERA_INLINE I bit_or(I a, I b) { return a | b; }
  TESSERA_INLINE I xor3(I a, I b, I c) { return a ^ b ^ c; }
  template <int kBits>
  TESSERA_INLINE I shift_right(I a) {
    return reinterpret_cast<I>(unsigned_of(a) >> kBits);
  }
  TESSERA_INLINE I shift_left(I a, I count) {
    const I shifted = reinterpret_cast<I>(unsigned_of(a) << (unsigned_of(count) & 31u));
    return shifted & (unsigned_of(count) < 32u);
  }
  TESSERA_INLINE void mul_wide(I a, I b, I& high, I& low) {
    for (int l = 0; l < kLanes; ++l) {
      const uint64_t product = uint64_t{static_cast<uint32_t>(a[l])} * static_cast<uint32_t>(b[l]);
      high[l] = static_cast<int32_t>(product >> 32), low[l] = static_cast<int32_t>(product);
    }
  }
  // sum with `bit` added in the 16-bit halves where words >= threshold, unsigned.
  TESSERA_INLINE I add_where_not_less(I sum, I words, I threshold, I bit) {
    typedef uint16_t Halves __attribute__((vector_size(16)));
    const auto halves = [](I a) { return reinterpret_cast<Halves>(a); };
    const auto not_less = reinterpret_cast<I>(halves(words) >= halves(threshold));
    return add(sum, not_less & bit);
  }
  TESSERA_INLINE F to_float(I a) { return __builtin_convertvector(a, F); }
  TESSERA_INLINE I as_int(F a) { return reinterpret_cast<I>(a); }
  TESSERA_INLINE F as_float(I a) { return reinterpret_cast<F>(a); }
  TESSERA_INLINE void interleave_halves(I a, I b, I& first, I& second) { first = a, second = b; }

  // ---- predicates ----
  TESSERA_INLINE M test_bit(I words, I bit) { return (words & bit) != I{}; }
  TESSERA_INLINE M less(F a, F b) { return a < b; }
  TESSERA_INLINE M equal(F a, F b) { return a == b; }
  TESSERA_INLINE M less(I a, I b) { return a < b; }
  TESSERA_INLINE M equal(I a, I b) { return a == b; }
  TESSERA_INLINE F select(M m, F a, F b) { return as_float((m & as_int(a)) | (~m & as_int(b))); }
  TESSERA_INLINE I select(M m, I a, I b) { return (m & a) | (~m & b); }
  TESSERA_INLINE bool any(M m) { return ((m[0] | m[1]) | (m[2] | m[3])) != 0; }

  // ---- x[i][j] <-> x[j][i] ----
  TESSERA_INLINE void transpose(F (&x)[kLanes]) {
    const F a = x[0], b = x[1], c = x[2], d = x[3];
    for (int l = 0; l < kLanes; ++l) x[l] = F{a[l], b[l], c[l], d[l]};
  }

 private:
  typedef uint32_t U __attribute__((vector_size(16)));

  // a b + c for the exponents of large logits, where a second rounding would show in the result.
  TESSERA_INLINE F rounded_once(F a, F b, F c) {
#if defined(__aarch64__) || defined(__FMA__)
    return a * b + c;
#else
    typedef double D __attribute__((vector_size(32)));
    const D product = __builtin_convertvector(a, D) * __builtin_convertvector(b, D);
    return __builtin_convertvector(product + __builtin_convertvector(c, D), F);
#endif
  }
  TESSERA_INLINE U unsigned_of(I a) { return reinterpret_cast<U>(a); }

  // The result is 0 or infinity beyond [-127, 128] anyway; NaN passes (second operand of max, min).
  TESSERA_INLINE F bounded(F x) { return min(set1(128.0f), max(set1(-127.0f), x)); }
  TESSERA_INLINE F rounded(F x) {  // |x| < 2^22
    const F magic = set1(12582912.0f);
    return (x + magic) - magic;
  }
  TESSERA_INLINE F power_of_2(F n) {  // 0 for n = -127; the integer stands in the low mantissa bits
    return as_float((as_int(n + set1(12582912.0f + 127.0f)) & set1i(0x1FF)) << 23);
  }
  TESSERA_INLINE F widen_fp16(I half) {  // no subnormal fp32 on the way: they may be flushed
    const I magnitude = half & set1i(0x7FFF);
    const I subnormal = as_int(to_float(magnitude) * set1(0x1p-24f));
    const I normal = (magnitude << 13) + set1i(112 << 23);
    const I special = (magnitude << 13) | set1i(0x7F800000);  // infinity, NaN
    const I finite = select(magnitude < set1i(0x400), subnormal, normal);
    const I bits = select(magnitude < set1i(0x7C00), finite, special);
    return as_float(bits | ((half & set1i(0x8000)) << 16));
  }
  TESSERA_INLINE uint16_t narrow_fp16(float a) {
    uint32_t bits;
    memcpy(&bits, &a, sizeof bits);
    const uint32_t sign = bits >> 16 & 0x8000u;
    bits &= 0x7FFFFFFFu;
    if (bits > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00u);
    if (bits >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);  // rounds to infinity
    if (bits < 0x38800000u) {  // subnormal: adding 0.5 rounds to units of 2^-24
      float magnitude;
      memcpy(&magnitude, &bits, sizeof bits);
      magnitude += 0.5f;
      memcpy(&bits, &magnitude, sizeof bits);
      return static_cast<uint16_t>(sign | (bits - 0x3F000000u));
    }
    bits += 0xFFFu + (bits >> 13 & 1u) - (112u << 23);
    return static_cast<uint16_t>(sign | bits >> 13);
  }
};

}  // namespace
}  // namespace tessera::cpu
