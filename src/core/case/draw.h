// SPDX-License-Identifier: Apache-2.0
// The random draws behind a case's data, one definition for every language. Pure functions of
// (seed, number, index): no state, no allocation, any thread, any order.
//
// Number says what is drawn (kDrawQ ... kDrawSegments). The words of counter c are
//   w0..w3 = philox4x32_7(key = (seed, number), counter = (c low, c high, 0, 0)).
// Elements of a floating tensor come in pairs: elements 2c and 2c+1 share counter c. Every integer
// and every probability has a counter of its own: its index in the lists of src/conformance/data.h.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/mask/philox.h"

namespace tessera {

enum DrawNumber : uint32_t {
  kDrawQ,
  kDrawK,
  kDrawV,
  kDrawDo,
  kDrawBias,
  kDrawSink,
  kDrawSlopes,
  kDrawDlse,
  kDrawMask,
  kDrawRanges,
  kDrawLengths,
  kDrawPages,
  kDrawSegments,
  kDrawStarts,
  kDrawShift,
  kDrawKeepTail,
  kDrawPartLse,  // of the other part of a union
  kDrawPartO,
  kDrawHeld,  // what outputs of accumulate hold
  kDrawLow,   // which elements of a bias are low
  kDrawWindows,
};

inline Philox4 draw_words(uint32_t seed, uint32_t number, uint64_t counter) {
  return philox4x32_7(seed, number, static_cast<uint32_t>(counter),
                      static_cast<uint32_t>(counter >> 32), 0, 0);
}

// Elements 2c and 2c+1 of a tensor of independent N(0, 1) values, by Box and Muller in fp64.
struct NormalPair {
  double even, odd;
};
inline NormalPair draw_normals(uint32_t seed, uint32_t number, uint64_t counter) {
  const Philox4 w = draw_words(seed, number, counter);
  const double u = (w.word[0] + 0.5) / 4294967296.0;
  const double radius = std::sqrt(-2.0 * std::log(u));
  const double angle = 2.0 * 3.14159265358979323846 * w.word[1] / 4294967296.0;
  return {radius * std::cos(angle), radius * std::sin(angle)};
}

// An integer in [0, range); range >= 1.
inline int64_t draw_integer(uint32_t seed, uint32_t number, uint64_t index, int64_t range) {
  return static_cast<int64_t>(draw_words(seed, number, index).word[2] %
                              static_cast<uint64_t>(range));
}

// True with probability p.
inline bool draw_chance(uint32_t seed, uint32_t number, uint64_t index, double p) {
  return draw_words(seed, number, index).word[3] / 4294967296.0 < p;
}

}  // namespace tessera
