// SPDX-License-Identifier: Apache-2.0
// Which elements of a dense mask or bias [B, H, Q, K] a case's words choose: blocks of 64 x 64,
// rows, keys. Pure functions of the words and of where an element lies.
#pragma once

#include "core/case/case.h"
#include "core/case/draw.h"

namespace tessera {

// The extents that a tensor's elements are counted by (1 where it is broadcast or expanded), and
// one element of it, number e in their C order.
struct PatternElement {
  int64_t extent[4], axis[4], e;

  int64_t block() const {
    const int64_t rows = (extent[2] + 63) / 64, columns = (extent[3] + 63) / 64;
    return (plane() * rows + axis[2] / 64) * columns + axis[3] / 64;
  }
  int64_t row() const { return plane() * extent[2] + axis[2]; }
  int64_t key() const { return plane() * extent[3] + axis[3]; }

 private:
  int64_t plane() const { return axis[0] * extent[1] + axis[1]; }
};

inline bool is_low(const CaseBiasLow& low, uint32_t seed, const PatternElement& at) {
  using Where = CaseBiasLow::Where;
  const auto drawn = [&](int64_t index) { return draw_chance(seed, kDrawLow, index, low.p); };
  switch (low.where) {
    case Where::kNone:
      return false;
    case Where::kRandom:
      return drawn(at.e);
    case Where::kKeys:
      return drawn(at.key());
    case Where::kRows:
      return drawn(at.row());
    case Where::kBlocks:
      return drawn(at.block());
    case Where::kFrom:
      return at.axis[3] >= low.from;
    case Where::kCausal:
      return at.axis[3] > at.axis[2];
  }
  return false;
}

}  // namespace tessera
