// SPDX-License-Identifier: Apache-2.0
// Storage types of q, k, v, o and the coefficients that every level of the trait layer shares.
//
// The trait layer (amx.h, avx512bf16.h, avx512.h, avx2.h, portable.h) is one struct per instruction set,
// all with the same static functions. Kernels are templates on that struct, called S:
//
//   kLanes               fp32 lanes of a vector F; queries stand in lanes
//   kRows                rows (keys or head dims) of a register tile of kRows x 2 vectors
//   Narrow, Wide         the same machine with half the lanes, for strips of few queries, and back;
//                        itself where there is none. kNarrow: this is the half
//   kHasBf16Dot          Pairs and dot() exist: two bf16 products a lane, summed in fp32
//   kHasTiles            matrix tiles of 16 x 16 fp32 and 16 x 32 bf16 exist: see amx.h
//   F, I, M              vector of fp32, of int32, of lane predicates
//   load, load_n         kLanes elements of a storage type as fp32; of n < kLanes, others 0: bytes
//                        past the n-th are not read
//   store, store_n       the reverse, rounded to nearest even, NaN stays NaN
//   stream, end_streams  with kStreams: a cache line (64-byte aligned; one vector of fp32, two of
//   16
//                        bits) past the caches, without fetching it; before others may look at it
//   broadcast            one element of memory to all lanes, as fp32
//   fma, fms, fnma       a b + c, a b - c, c - a b; the last two round once on every level
//   max(a, b), min(a, b) b where either is NaN
//   exp2, exp2_fast      relative error 9e-8 and 1e-4; exactly 1 at 0 and 0 at -inf; NaN stays NaN;
//                        arguments up to 127
//   nonzero_bytes        32 bytes as bits
//   test_bit(w, bit)     lanes whose word has that bit
//   select(m, a, b)      a where m, else b
//   transpose            kLanes x kLanes elements in registers
//   mul_wide             32 x 32 -> 64 bits, as high and low words
//   interleave_halves    [lanes 0..7 of a, of b], [lanes 8..15 of a, of b]: see dropout.h
//
// Everything is in an unnamed namespace and no function of the standard library is called: an
// AVX-512 copy of an inline function that the linker shares would crash older machines.
#pragma once

#include <stdint.h>
#include <string.h>

namespace tessera::cpu {

struct Bf16 {
  uint16_t bits;
};
struct Fp16 {
  uint16_t bits;
};
struct E4m3 {
  uint8_t bits;
};
struct E5m2 {
  uint8_t bits;
};

namespace {

#define TESSERA_INLINE static inline __attribute__((always_inline))
#define TESSERA_UNROLL _Pragma("GCC unroll 16")

// 2^f on [-1/2, 1/2] = 1 + f * poly(f); minimax in relative error with the constant fixed at 1, so
// that a rescaling by 2^0 changes no bit.
constexpr float kExp2[5] = {0.6931469776f, 0.2402224207f, 0.05550733768f, 0.009671513152f,
                            0.00132647198f};                                   // 9.1e-8
constexpr float kExp2Fast[3] = {0.6932829396f, 0.2422109785f, 0.0550088683f};  // 1.0e-4

// e4m3fn to fp16 keeps the mantissa and moves the exponent by 8: exact with a factor of 2^8, also
// for subnormals. 0x7F is its only NaN.
constexpr float kE4m3Scale = 256.0f;

TESSERA_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace
}  // namespace tessera::cpu
