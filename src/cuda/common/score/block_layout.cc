// SPDX-License-Identifier: Apache-2.0
#include "cuda/common/score/block_layout.h"

#include "core/workspace.h"

namespace tessera::cuda {
namespace {

int64_t up(int64_t a, int64_t b) { return Count{a}.pieces(b).value(); }

}  // namespace

int64_t mask_keys(const Problem& problem) {
  const int64_t extent = problem.tensor[TESSERA_MASK].extent[3];
  return extent == 1 ? sizes_of(problem).sk : extent;
}

BlockLayout layout_of(const Problem& problem, Walked walked, int tile, int step, bool with_bits,
                      void* base) {
  constexpr int kAlignment = 256;
  Workspace workspace(base);
  const Sizes s = sizes_of(problem);
  const bool keys = walked == Walked::kKeys;
  const int64_t batch = s.batch > 0 ? s.batch : 1, extent = keys ? s.sk : s.sq;
  BlockLayout l;
  const bool packed = keys ? is_thd_k(problem) : is_thd_q(problem);
  l.slots = static_cast<int>(packed ? extent / step + batch + 1 : up(extent, step) * batch);
  if (given(problem, TESSERA_SEGMENT_IDS_Q)) l.segments = workspace.take<Hull>(l.slots);
  if (!keys && given(problem, TESSERA_KEY_RANGES)) {
    l.ranges_heads = static_cast<int>(problem.tensor[TESSERA_KEY_RANGES].extent[1]);
    l.ranges = workspace.take<RangeHulls>(int64_t{l.slots} * l.ranges_heads, kAlignment);
  }
  if (given(problem, TESSERA_MASK)) {
    const Tensor& mask = problem.tensor[TESSERA_MASK];
    const Count heads = Count{mask.extent[0]} * mask.extent[1];
    l.tile_q = keys ? tile : step;
    l.tile_k = keys ? step : tile;
    l.tiles_q = up(mask.extent[2], l.tile_q);
    l.tiles_k = up(mask_keys(problem), l.tile_k);
    l.mask = workspace.take<uint8_t>(heads * l.tiles_q * l.tiles_k, kAlignment);
    if (with_bits && l.tile_k % 32 == 0) {
      l.words = static_cast<int>(4 * up(mask_keys(problem), 128));
      l.bits = workspace.take<uint32_t>(heads * mask.extent[2] * l.words, kAlignment);
    }
  }
  l.bytes = Count{workspace.bytes()}.up_to(kAlignment).value();
  return l;
}

bool has_block_map(const Problem& problem) {
  return given(problem, TESSERA_MASK) || given(problem, TESSERA_KEY_RANGES) ||
         given(problem, TESSERA_SEGMENT_IDS_Q);
}

int64_t block_map_bytes(const Problem& problem, Walked walked, int tile, int step, bool with_bits) {
  return layout_of(problem, walked, tile, step, with_bits).bytes;
}

}  // namespace tessera::cuda
