// SPDX-License-Identifier: Apache-2.0
#include "core/problem/dtype.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

namespace tessera {
namespace {

constexpr std::string_view kNames[] = {"none", "fp32", "bf16", "fp16",  "fp64",
                                       "e4m3", "e5m2", "bool", "int32", "int64"};

// A binary float of 8 or 16 bits: sign, exponent, mantissa.
struct Float {
  int mantissa_bits, bias;
  double largest;     // finite
  uint32_t infinity;  // what overflow becomes, without the sign
  uint32_t nan;
};
constexpr Float kBf16{7, 127, 0x1.FEp127, 0x7F80, 0x7FC0};
constexpr Float kFp16{10, 15, 65504.0, 0x7C00, 0x7E00};
constexpr Float kE4m3{3, 7, 448.0, 0x7F, 0x7F};  // e4m3fn has no infinity
constexpr Float kE5m2{2, 15, 57344.0, 0x7C, 0x7E};

uint32_t encode(double value, const Float& f, int width) {
  const uint32_t sign = static_cast<uint32_t>(std::signbit(value)) << (width - 1);
  if (std::isnan(value)) return sign | f.nan;
  const double magnitude = std::fabs(value);
  if (magnitude == 0) return sign;
  if (std::isinf(magnitude)) return sign | f.infinity;
  int exponent = std::ilogb(magnitude);
  if (exponent < 1 - f.bias) exponent = 1 - f.bias;  // subnormals share the smallest quantum
  // Scaling by a power of two is exact, so this is the only rounding.
  const double steps = std::nearbyint(std::scalbn(magnitude, f.mantissa_bits - exponent));
  if (std::scalbn(steps, exponent - f.mantissa_bits) > f.largest) return sign | f.infinity;
  // steps carries the implicit bit, and a carry out of the mantissa moves on to the exponent.
  return sign | ((static_cast<uint32_t>(exponent + f.bias - 1) << f.mantissa_bits) +
                 static_cast<uint32_t>(steps));
}

double decode_fp16(uint32_t bits) {
  const uint32_t sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31, mantissa = bits & 1023;
  if (exponent == 0) return (sign ? -1.0 : 1.0) * mantissa * 0x1p-24;
  const uint32_t widened = exponent == 31 ? 255 : exponent + 112;
  return std::bit_cast<float>(sign | widened << 23 | mantissa << 13);
}

double decode_e4m3(uint32_t bits) {
  const double sign = bits & 0x80 ? -1.0 : 1.0;
  const uint32_t exponent = bits >> 3 & 15, mantissa = bits & 7;
  if (exponent == 15 && mantissa == 7) return std::numeric_limits<double>::quiet_NaN();
  if (exponent == 0) return sign * mantissa * 0x1p-9;
  return sign * std::bit_cast<float>((exponent + 120) << 23 | mantissa << 20);
}

template <typename T>
T load(const void* base, int64_t index) {
  T value;
  std::memcpy(&value, static_cast<const char*>(base) + index * int64_t{sizeof(T)}, sizeof(T));
  return value;
}

template <typename T>
void store(void* base, int64_t index, T value) {
  std::memcpy(static_cast<char*>(base) + index * int64_t{sizeof(T)}, &value, sizeof(T));
}

}  // namespace

std::string_view dtype_name(int32_t dtype) {
  if (dtype < TESSERA_NONE || dtype > TESSERA_INT64) return "unknown";
  return kNames[dtype];
}

int32_t parse_dtype(std::string_view name) {
  for (int32_t dtype = TESSERA_FP32; dtype <= TESSERA_INT64; ++dtype) {
    if (name == kNames[dtype]) return dtype;
  }
  return TESSERA_NONE;
}

double load_element(const void* base, int64_t index, int32_t dtype) {
  switch (dtype) {
    case TESSERA_FP32:
      return load<float>(base, index);
    case TESSERA_FP64:
      return load<double>(base, index);
    case TESSERA_BF16:
      return std::bit_cast<float>(static_cast<uint32_t>(load<uint16_t>(base, index)) << 16);
    case TESSERA_FP16:
      return decode_fp16(load<uint16_t>(base, index));
    case TESSERA_E4M3:
      return decode_e4m3(load<uint8_t>(base, index));
    case TESSERA_E5M2:
      return decode_fp16(static_cast<uint32_t>(load<uint8_t>(base, index)) << 8);
    case TESSERA_BOOL:
      return load<uint8_t>(base, index);
    case TESSERA_INT32:
      return load<int32_t>(base, index);
    case TESSERA_INT64:
      return static_cast<double>(load<int64_t>(base, index));
  }
  return 0;
}

void store_element(void* base, int64_t index, int32_t dtype, double value) {
  switch (dtype) {
    case TESSERA_FP32:
      return store(base, index, static_cast<float>(value));
    case TESSERA_FP64:
      return store(base, index, value);
    case TESSERA_BF16:
      return store(base, index, static_cast<uint16_t>(encode(value, kBf16, 16)));
    case TESSERA_FP16:
      return store(base, index, static_cast<uint16_t>(encode(value, kFp16, 16)));
    case TESSERA_E4M3:
      return store(base, index, static_cast<uint8_t>(encode(value, kE4m3, 8)));
    case TESSERA_E5M2:
      return store(base, index, static_cast<uint8_t>(encode(value, kE5m2, 8)));
    case TESSERA_BOOL:
      return store(base, index, static_cast<uint8_t>(value != 0));
    case TESSERA_INT32:
      return store(base, index, static_cast<int32_t>(value));
    case TESSERA_INT64:
      return store(base, index, static_cast<int64_t>(value));
  }
}

double largest_finite(int32_t dtype) {
  switch (dtype) {
    case TESSERA_FP64:
      return std::numeric_limits<double>::max();
    case TESSERA_FP32:
      return std::numeric_limits<float>::max();
    case TESSERA_FP16:
      return kFp16.largest;
    case TESSERA_BF16:
      return kBf16.largest;
    case TESSERA_E4M3:
      return kE4m3.largest;
    case TESSERA_E5M2:
      return kE5m2.largest;
  }
  return 0;
}

double half_ulp(int32_t dtype) {
  switch (dtype) {
    case TESSERA_FP64:
      return 0x1p-53;
    case TESSERA_FP32:
      return 0x1p-24;
    case TESSERA_FP16:
      return 0x1p-11;
    case TESSERA_BF16:
      return 0x1p-8;
    case TESSERA_E4M3:
      return 0x1p-4;
    case TESSERA_E5M2:
      return 0x1p-3;
  }
  return 0;
}

}  // namespace tessera
