// SPDX-License-Identifier: Apache-2.0
// Rows of an fp8 cache as bf16, which holds every value of either format: 64 elements are two
// lookups in tables of bytes, the sign, and two interleavings, a quarter of what it takes to form
// fp32. Scales stay outside: they multiply S, and O at its end.
#pragma once

#include "cpu/simd/types.h"
#include "tessera.h"

namespace tessera::cpu {
namespace {

// bf16 of an fp8 magnitude (the byte without its sign), with kMantissa bits of mantissa.
template <int kMantissa>
constexpr uint16_t bf16_of(int magnitude) {
  constexpr int kBias = (1 << (6 - kMantissa)) - 1, kHidden = 1 << kMantissa;
  int exponent = magnitude >> kMantissa, mantissa = magnitude & (kHidden - 1);
  if (kMantissa == 3 && magnitude == 0x7F) return 0x7FC0;
  if (kMantissa == 2 && exponent == 31) return mantissa == 0 ? 0x7F80 : 0x7FC0;
  if (magnitude == 0) return 0;
  if (exponent == 0) {
    for (exponent = 1; mantissa < kHidden; mantissa *= 2) --exponent;
    mantissa -= kHidden;
  }
  return static_cast<uint16_t>((exponent - kBias + 127) << 7 | mantissa << (7 - kMantissa));
}

struct Fp8Table {
  alignas(64) uint8_t low[128], high[128];  // bytes of the bf16
};
template <int kMantissa>
constexpr Fp8Table make_fp8_table() {
  Fp8Table table{};
  for (int i = 0; i < 128; ++i) {
    table.low[i] = static_cast<uint8_t>(bf16_of<kMantissa>(i));
    table.high[i] = static_cast<uint8_t>(bf16_of<kMantissa>(i) >> 8);
  }
  return table;
}
constexpr Fp8Table kE4m3Table = make_fp8_table<3>(), kE5m2Table = make_fp8_table<2>();

// Rows [first, last) of n elements go to `to`, step elements apart, and the table follows. Rows of
// zeros stay where they are, and so do all that are bf16.
template <typename S>
void widen_fp8_rows(int32_t dtype, const char* zeros, int64_t n, int first, int last,
                    const char** rows, Bf16* to, int64_t step) {
  if (dtype == TESSERA_BF16) return;
  const Fp8Table& table = dtype == TESSERA_E4M3 ? kE4m3Table : kE5m2Table;
  S::Wide::widen_bytes(rows, zeros, first, last, n, table.low, table.high, to, step);
}

}  // namespace
}  // namespace tessera::cpu
