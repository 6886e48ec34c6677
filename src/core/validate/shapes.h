// SPDX-License-Identifier: Apache-2.0
// The shape of each tensor beside the others: what a tensor that is given must have, and what
// with_outputs() fills in.
#pragma once

#include "core/problem/problem.h"

namespace tessera {

struct Axis {
  int64_t extent;    // kFree: any
  const char* name;  // printed where the extent is free or unknown
  bool or_one = false;
};
struct Shape {
  Axis axis[4];  // those beyond the tensor's rank are 0
};
inline constexpr int64_t kFree = -1;
inline constexpr int64_t kUnknown = -2;  // thd without max_seqlen: only a broadcast axis is legal

// s: sizes_of(p), of a problem that validate_sizes() accepted.
Shape expected_shape(const Problem& p, const Sizes& s, int index);

// "; or pass layout=..." where q and k, given as [b, s, h, d], would go together as [b, h, s, d].
const char* layout_hint(const Problem& p);

}  // namespace tessera
