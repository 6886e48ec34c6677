// SPDX-License-Identifier: Apache-2.0
#include "core/count.h"
#include "cuda/common/score/block_layout.h"
#include "cuda/common/score/blocks.cuh"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;

struct SummaryArgs {
  Params params;
  int step, slots, blocks;  // blocks: of the longest sequence
  Hull* segments;
  RangeHulls* ranges;
  int ranges_heads;
};

// A warp for each block of each sequence: x blocks, y sequences, z heads of the ranges.
template <typename Side>
__global__ void __launch_bounds__(kThreads) summary_kernel(const __grid_constant__ SummaryArgs a) {
  const Params& p = a.params;
  const int block = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32;
  const int head = static_cast<int>(blockIdx.z);
  for (int n = static_cast<int>(blockIdx.y); n < p.batch; n += static_cast<int>(gridDim.y)) {
    const Rows rows = rows_of<Side>(p, n);
    const int begin = block * a.step;
    if (begin >= rows.length) continue;
    const int slot = slot_of_block<Side>(p, n, rows.first, a.step, block);
    if (a.segments && head == 0) {
      const Hull hull = hull_of_segments(p.tensor[Side::kSegmentIds], rows, begin, a.step);
      if (threadIdx.x % 32 == 0) a.segments[slot] = hull;
    }
    if (a.ranges) {
      const RangeHulls hulls = hulls_of_ranges(p, rows, head, begin, a.step, range_start(p, n));
      if (threadIdx.x % 32 == 0) a.ranges[int64_t{head} * a.slots + slot] = hulls;
    }
  }
}

struct MaskArgs {
  View mask;
  int heads, rows, keys;  // of the mask
  int tile_q, tile_k;     // of a state; tile_k is a multiple of 16
  int tiles_q, tiles_k;
  int drop;  // true = hidden
  uint8_t* states;
  uint32_t* bits;  // null: not asked
  int words;       // of a row
};

// Bit i: byte i is not zero.
__device__ uint32_t bits_of_bytes(uint32_t bytes) {
  return (__vcmpne4(bytes, 0) & 0x01010101) * 0x10204080 >> 28;
}

// Which of the 16 keys from `from` on are shown, the first in the lowest bit; `count` of them
// exist.
__device__ uint32_t shown_of(const MaskArgs& a, const uint8_t* from, int count) {
  uint32_t bits = 0;
  if (count == 16 && a.mask.stride[3] == 1 && a.mask.vector_bytes == 16) {
    const uint4 bytes = *reinterpret_cast<const uint4*>(from);
    bits = bits_of_bytes(bytes.x) | bits_of_bytes(bytes.y) << 4 | bits_of_bytes(bytes.z) << 8 |
           bits_of_bytes(bytes.w) << 12;
  } else {
    for (int i = 0; i < count; ++i) bits |= (from[i * a.mask.stride[3]] != 0) << i;
  }
  return (a.drop ? ~bits : bits) & ((1u << count) - 1);
}

// A CTA for each state: x key tiles, y query tiles, z sequences and heads; a thread looks at 16
// keys at a time.
__global__ void __launch_bounds__(kThreads) mask_kernel(const __grid_constant__ MaskArgs a) {
  constexpr int kKeys = 16;
  auto* const bits = reinterpret_cast<uint16_t*>(a.bits);
  for (int tile_q = static_cast<int>(blockIdx.y); tile_q < a.tiles_q;
       tile_q += static_cast<int>(gridDim.y)) {
    const int64_t head = blockIdx.z;
    const int key0 = static_cast<int>(blockIdx.x) * a.tile_k;
    const int row0 = tile_q * a.tile_q, rows = min(a.tile_q, a.rows - row0);
    const int pieces = a.tile_k / kKeys;  // of a row
    const auto* bytes = static_cast<const uint8_t*>(a.mask.data) +
                        offset_of(a.mask, head / a.heads, head % a.heads);
    bool any = false, all = true;
    for (int i = static_cast<int>(threadIdx.x); i < rows * pieces; i += kThreads) {
      const int64_t row = row0 + i / pieces;
      const int key = key0 + i % pieces * kKeys, count = min(max(a.keys - key, 0), kKeys);
      const uint32_t shown =
          shown_of(a, bytes + row * a.mask.stride[2] + key * a.mask.stride[3], count);
      any |= shown != 0;
      all &= shown == (1u << count) - 1;
      if (bits && key < 32 * a.words) {
        bits[((head * a.rows + row) * a.words * 32 + key) / kKeys] = static_cast<uint16_t>(shown);
      }
    }
    any = __syncthreads_or(any);
    all = __syncthreads_and(all);
    if (threadIdx.x == 0) {
      a.states[(head * a.tiles_q + tile_q) * a.tiles_k + blockIdx.x] = all   ? kBlockFull
                                                                       : any ? kBlockPartial
                                                                             : kBlockHidden;
    }
  }
}

}  // namespace

Status map_blocks(const Problem& problem, const Params& p, Walked walked, int tile, int step,
                  void* workspace, BlockMap* map, cudaStream_t stream, bool with_bits) {
  const BlockLayout l = layout_of(problem, walked, tile, step, with_bits, workspace);
  const bool keys = walked == Walked::kKeys;
  *map = {};
  map->step = step;
  map->slots = l.slots;
  map->segments = l.segments;
  map->ranges = l.ranges;
  SummaryArgs a{p, step, l.slots, 0, l.segments, l.ranges, 1};
  if (l.ranges) {
    map->ranges_head = l.ranges_heads > 1 ? l.slots : 0;
    a.ranges_heads = l.ranges_heads;
  }
  const int extent = keys ? p.sk : p.sq;
  if ((a.segments || a.ranges) && extent > 0 && p.batch > 0) {
    const dim3 grid(static_cast<unsigned>(Count{extent}.pieces(step).pieces(kWarps).value()),
                    static_cast<unsigned>(p.batch < 65535 ? p.batch : 65535),
                    static_cast<unsigned>(a.ranges_heads));
    const void* kernel = keys ? reinterpret_cast<const void*>(&summary_kernel<SideOfKeys>)
                              : reinterpret_cast<const void*>(&summary_kernel<SideOfQueries>);
    TESSERA_RETURN_IF_ERROR(launch_kernel("block summary", kernel, grid, kThreads, 0, &a, stream));
  }
  if (!given(problem, TESSERA_MASK)) return {};
  const Tensor& mask = problem.tensor[TESSERA_MASK];
  const int64_t heads = mask.extent[0] * mask.extent[1], states = l.tiles_q * l.tiles_k;
  if (heads * states == 0 || heads > 65535) return {};
  MaskArgs m{p.tensor[TESSERA_MASK],
             static_cast<int>(mask.extent[1]),
             static_cast<int>(mask.extent[2]),
             static_cast<int>(mask_keys(problem)),
             l.tile_q,
             l.tile_k,
             static_cast<int>(l.tiles_q),
             static_cast<int>(l.tiles_k),
             (p.flags & TESSERA_MASK_DROP) != 0,
             l.mask,
             l.bits,
             l.words};
  map->mask = m.states;
  map->mask_row = l.tiles_q > 1 ? l.tiles_k : 0;
  map->mask_head = mask.extent[1] > 1 ? states : 0;
  map->mask_batch = mask.extent[0] > 1 ? states * mask.extent[1] : 0;
  map->bits = m.bits;
  map->bits_row = mask.extent[2] > 1 ? l.words : 0;
  map->bits_head = mask.extent[1] > 1 ? mask.extent[2] * l.words : 0;
  map->bits_batch = mask.extent[0] > 1 ? mask.extent[1] * mask.extent[2] * l.words : 0;
  const dim3 grid(static_cast<unsigned>(l.tiles_k),
                  static_cast<unsigned>(l.tiles_q < 65535 ? l.tiles_q : 65535),
                  static_cast<unsigned>(heads));
  return launch_kernel("mask states", reinterpret_cast<const void*>(&mask_kernel), grid, kThreads,
                       0, &m, stream);
}

}  // namespace tessera::cuda
