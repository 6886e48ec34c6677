// SPDX-License-Identifier: Apache-2.0
// Products and sums of the reference in either arithmetic: fp64 in any order, fp32 in the order of
// the formulas.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/problem/dtype.h"

namespace tessera::reference {

inline double rounded(double value, int32_t dtype) {
  if (dtype == TESSERA_FP64) return value;
  if (dtype == TESSERA_FP32) return static_cast<float>(value);
  double slot = 0;
  store_element(&slot, 0, dtype, value);
  return load_element(&slot, 0, dtype);
}

// Adds in the order of the terms, which the error rule takes for the error of fp32.
inline float dot(const float* a, const float* b, int64_t d) {
  float sum = 0;
  for (int64_t c = 0; c < d; ++c) sum += a[c] * b[c];
  return sum;
}

// fp64 has digits to spare: eight running sums, so that the compiler may use vectors.
inline double dot(const double* a, const double* b, int64_t d) {
  double sum[8] = {};
  int64_t c = 0;
  for (; c + 8 <= d; c += 8) {
    for (int lane = 0; lane < 8; ++lane) sum[lane] += a[c + lane] * b[c + lane];
  }
  for (; c < d; ++c) sum[c % 8] += a[c] * b[c];
  return ((sum[0] + sum[4]) + (sum[1] + sum[5])) + ((sum[2] + sum[6]) + (sum[3] + sum[7]));
}

template <typename T>
T dot_of_absolutes(const T* a, const T* b, int64_t d) {
  T sum = 0;
  for (int64_t c = 0; c < d; ++c) sum += std::abs(a[c] * b[c]);
  return sum;
}

template <typename T>
void add_scaled(T* to, T factor, const T* from, int64_t d) {
  for (int64_t c = 0; c < d; ++c) to[c] += factor * from[c];
}

}  // namespace tessera::reference
