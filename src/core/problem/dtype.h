// SPDX-License-Identifier: Apache-2.0
// Sizes and names of tessera_dtype, and scalar conversions that round to nearest even.
#pragma once

#include <cstdint>
#include <string_view>

#include "tessera.h"

namespace tessera {

constexpr int64_t size_of(int32_t dtype) {
  switch (dtype) {
    case TESSERA_FP64:
    case TESSERA_INT64:
      return 8;
    case TESSERA_FP32:
    case TESSERA_INT32:
      return 4;
    case TESSERA_BF16:
    case TESSERA_FP16:
      return 2;
    case TESSERA_E4M3:
    case TESSERA_E5M2:
    case TESSERA_BOOL:
      return 1;
  }
  return 0;
}

constexpr bool is_float(int32_t dtype) { return dtype >= TESSERA_FP32 && dtype <= TESSERA_E5M2; }
constexpr bool is_fp8(int32_t dtype) { return dtype == TESSERA_E4M3 || dtype == TESSERA_E5M2; }
constexpr bool is_16bit(int32_t dtype) { return dtype == TESSERA_BF16 || dtype == TESSERA_FP16; }

std::string_view dtype_name(int32_t dtype);  // "fp32"; "dtype 77" is "unknown"
int32_t parse_dtype(std::string_view name);  // TESSERA_NONE if unknown

// One element as double, and back with one rounding to nearest even (overflow to infinity, e4m3 to
// NaN). The reference, the generator and tests use it; kernels have their own vector forms.
double load_element(const void* base, int64_t index, int32_t dtype);
void store_element(void* base, int64_t index, int32_t dtype, double value);

// The largest finite number of a floating dtype; its minimum is the negative of it.
double largest_finite(int32_t dtype);

// Half an ulp at 1.0: the u of the error rule. fp32 2^-24, fp16 2^-11, bf16 2^-8, e4m3 2^-4.
double half_ulp(int32_t dtype);

}  // namespace tessera
