// SPDX-License-Identifier: Apache-2.0
// What may be given only beside something else, or never: the sentences that validate() shares.
#pragma once

#include <cinttypes>

#include "core/problem/problem.h"

namespace tessera {

inline Status check_required(const Problem& p, int index, const char* why) {
  if (given(p, index)) return {};
  return invalid("%s=None: must be given, because %s", name_of(p, index), why);
}

// index may be given only beside `with`.
inline Status check_partner(const Problem& p, int index, int with) {
  if (!given(p, index) || given(p, with)) return {};
  return invalid("%s.shape=%s: needs %s, which is not given; give both or neither",
                 name_of(p, index), shape_text(p, index).c_str(), name_of(p, with));
}

inline Status check_flag_partner(const Problem& p, uint32_t flag, const char* name, int64_t value,
                                 int with) {
  if (!has(p, flag) || given(p, with)) return {};
  return invalid("%s=%" PRId64 ": needs %s, which is not given; give both or neither", name, value,
                 name_of(p, with));
}

inline Status check_excluded(const Problem& p, int index, const char* why) {
  if (!given(p, index)) return {};
  return invalid("%s.shape=%s: must not be given; %s", name_of(p, index),
                 shape_text(p, index).c_str(), why);
}

// The diagonal and where sequences begin; flags of parts and sums.
Status validate_positions(const Problem& problem);

// fp8: scales, their blocks, products, smoothing and largest values.
Status validate_rounding(const Problem& problem);

}  // namespace tessera
