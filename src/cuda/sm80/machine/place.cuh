// SPDX-License-Identifier: Apache-2.0
// The order in which the CTAs of a grid of tiles and heads begin.
#pragma once

namespace tessera::cuda::sm80 {

struct Place {
  int slot, head;
};

// The place of CTA `index` in a grid of `slots` tiles and `heads`: sections of heads one after the
// other, in each the tiles in order, those of its heads side by side. If the longest tiles of a
// head come first, a section ends with short ones, and few CTAs are waited for at the end of a
// grid; what the heads of a section read together should stay in L2.
__device__ inline Place place_of(int index, int slots, int heads, int section) {
  const int head0 = index / (slots * section) * section;
  const int at = index - slots * head0, side_by_side = min(section, heads - head0);
  return {at / side_by_side, head0 + at % side_by_side};
}

}  // namespace tessera::cuda::sm80
