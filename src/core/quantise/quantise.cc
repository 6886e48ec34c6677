// SPDX-License-Identifier: Apache-2.0
#include "core/quantise/quantise.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "core/mask/philox.h"

namespace tessera {
namespace {

constexpr float kMost = 448;               // of E4M3
constexpr float kLeastNormal = 0x1p-6f;    // below it E4M3 has steps of 2^-9,
constexpr float kSameSteps = 0x1.8p14f;    // which floats in [2^14, 2^15) have too
constexpr float kLeastScaled = 0x1p-110f;  // rows below it have scale 1, and are 0

float rounded_to_e4m3(float value) {
  const float size = std::min(std::abs(value), kMost);
  const auto bits = std::bit_cast<uint32_t>(size);
  // Three bits of the fraction stay; ties to even.
  const auto normal = std::bit_cast<float>((bits + 0x7FFFF + (bits >> 20 & 1)) & 0xFFF00000);
  const float subnormal = (size + kSameSteps) - kSameSteps;
  return std::isnan(value) ? value : std::copysign(size < kLeastNormal ? subnormal : normal, value);
}

// The smallest power of two beside which `largest` does not saturate.
float scale_for(float largest) {
  if (largest < kLeastScaled) return 1;
  int exponent = 0;
  const float fraction = std::frexp(largest, &exponent);  // in [1/2, 1)
  return std::ldexp(1.0f, exponent - 9 + (fraction > kMost / 512 ? 1 : 0));
}

// To stored * scale, beside the scale that the finite ones want.
void round(float* values, int64_t count) {
  float largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const float size = std::abs(values[i]);
    if (std::isfinite(size)) largest = std::max(largest, size);
  }
  const float scale = scale_for(largest), inverse = 1 / scale;  // both exact
  for (int64_t i = 0; i < count; ++i) values[i] = rounded_to_e4m3(values[i] * inverse) * scale;
}

}  // namespace

Rotation::Rotation(const Problem& p) {
  if (!has(p, TESSERA_SMOOTH_HADAMARD)) return;
  const int64_t columns = p.tensor[TESSERA_Q].extent[3];
  width_ = columns & -columns;
  for (int64_t c = 0; c < columns; ++c) {
    const Philox4 random = philox4x32_7(0, 0, static_cast<uint32_t>(c), 0, 0, 0);
    signs_.push_back(random.word[0] % 2 == 0 ? 1.0f : -1.0f);
  }
}

void Rotation::turn(float* row, float factor) const {
  const auto columns = static_cast<int64_t>(signs_.size());
  for (int64_t c = 0; c < columns; ++c) row[c] *= signs_[c] * factor;
  // Butterflies: each stage adds and subtracts neighbours `half` apart.
  for (int64_t half = 1; half < width_; half *= 2) {
    for (int64_t first = 0; first < columns; first += 2 * half) {
      for (float* x = row + first; x < row + first + half; ++x) {
        const float a = x[0], b = x[half];
        x[0] = a + b, x[half] = a - b;
      }
    }
  }
}

void add_keys(const float* rows, int64_t keys, int64_t columns, float* sum) {
  for (int64_t j = 0; j < keys; ++j, rows += columns) {
    for (int64_t c = 0; c < columns; ++c) sum[c] += std::isfinite(rows[c]) ? rows[c] : 0.0f;
  }
}

void round_keys(float* rows, int64_t keys, int64_t columns, const float* mean,
                const Rotation* rotation) {
  for (float* row = rows; row < rows + keys * columns; row += columns) {
    for (int64_t c = 0; mean && c < columns; ++c) row[c] -= mean[c];
    if (rotation) rotation->turn_key(row);
  }
  round(rows, keys * columns);
}

float round_query(float* row, int64_t columns, const float* mean, const Rotation* rotation) {
  float of_mean = 0;
  for (int64_t c = 0; mean && c < columns; ++c) of_mean += row[c] * mean[c];
  if (rotation) rotation->turn_query(row);
  round(row, columns);
  return of_mean;
}

}  // namespace tessera
