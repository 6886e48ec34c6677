// SPDX-License-Identifier: Apache-2.0
// One row of one head on its way: read, turned by its position, scaled and rounded to another
// dtype.
#pragma once

#include <cstdint>

namespace tessera::cpu {

// The angles of one position. half = 0: nothing turns.
struct Angles {
  const float* cos = nullptr;
  const float* sin = nullptr;
  int64_t half = 0;  // pairs
  bool interleaved = false;
  bool inverse = false;
};

// to = convert(turn(from) / scale), d elements; in place where both are one. fp8 saturates.
// Arithmetic is fp32, of fp64 rows fp64.
struct RowMove {
  int32_t from_dtype, to_dtype;
  int64_t d;
  Angles angles;
  float scale = 1;
};
void move_row(const RowMove& move, const char* from, char* to);

}  // namespace tessera::cpu
