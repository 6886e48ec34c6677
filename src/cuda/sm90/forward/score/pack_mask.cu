// SPDX-License-Identifier: Apache-2.0
// Packs a dense mask into bits, and sums up each block of keys under each row tile.
//
//   bits [heads, rows, blocks, 4 threads of a quad]: words of tile_n / 4 bits; bit e of thread t is
//       column 8 (e / 2) + 2 t + e % 2 of the block, as in an accumulator (machine/fragment.cuh)
//   states [heads, row tiles, blocks]: BlockState
//
// A CTA packs one block under one row tile, a quad of threads a row. The threads of a quad read
// groups of 8 keys one after the other, and then trade bits.
#include <type_traits>

#include "core/count.h"
#include "cuda/sm90/forward/score/blocks.cuh"
#include "cuda/sm90/forward/score/pack_mask.h"
#include "cuda/sm90/score/mask_launch.h"

namespace tessera::cuda::sm90 {
namespace {

constexpr int kThreads = 256;

struct PackParams {
  View mask;
  int heads;  // of the mask; the batch axis varies slower
  int rows, keys;
  int tile_m, tile_n, tiles, blocks;
  int drop;  // true = hidden
  void* bits;
  uint8_t* states;
};

// Bit i: byte i of the word is not 0.
__device__ __forceinline__ uint32_t bits_of_bytes(uint32_t word) {
  const uint32_t top = (((word & 0x7f7f7f7fu) + 0x7f7f7f7fu) | word) & 0x80808080u;
  return top * 0x00204081u >> 28;  // bits 7, 15, 23 and 31 to 28 ... 31
}

// Which of the 8 keys from `key` on a row shows; those past its end are hidden. kVectors: the row
// is dense and aligned to 8 bytes.
template <bool kVectors>
__device__ __forceinline__ uint32_t bits_of_group(const PackParams& p, const uint8_t* row,
                                                  int key) {
  const uint32_t exist = key + 8 <= p.keys ? 0xffu
                         : key < p.keys    ? 0xffu >> (key + 8 - p.keys)
                                           : 0u;
  uint32_t bits = 0;
  if (kVectors && exist == 0xff) {
    const uint2 bytes = *reinterpret_cast<const uint2*>(row + key);
    bits = bits_of_bytes(bytes.x) | bits_of_bytes(bytes.y) << 4;
  } else {
    for (int i = 0; i < 8; ++i) {
      if (exist >> i & 1 && row[(key + i) * p.mask.stride[3]] != 0) bits |= 1u << i;
    }
  }
  return (p.drop ? ~bits : bits) & exist;
}

// Byte i of thread t has the four pairs of bits of group 4 i + t; becomes, byte by byte, pair t of
// the groups 4 i ... 4 i + 3.
__device__ __forceinline__ uint32_t transpose_pairs(uint32_t x, int thread) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const uint32_t low = bit == 1 ? 0x33333333u : 0x0f0f0f0fu;  // pairs whose number lacks the bit
    const int shift = 2 * bit;
    const bool upper = thread & bit;
    const uint32_t got = __shfl_xor_sync(kAllLanes, x, bit);
    x = upper ? (x & ~low) | (got >> shift & low) : (x & low) | (got << shift & ~low);
  }
  return x;
}

template <int kTileN, bool kVectors>
__global__ void __launch_bounds__(kThreads) pack(const PackParams p) {
  using Word = std::conditional_t<kTileN == 64, uint16_t, uint32_t>;
  constexpr int kWords = kTileN / 32;  // groups of a thread
  const int block = blockIdx.x, tile = blockIdx.y;
  const int batch = blockIdx.z / p.heads, head = blockIdx.z % p.heads;
  const int quad = threadIdx.x % 4;
  const int first_row = tile * p.tile_m, end_row = min(first_row + p.tile_m, p.rows);
  bool any = false, all = true;
#pragma unroll 2
  for (int start = first_row; start < first_row + p.tile_m; start += kThreads / 4) {
    const int row = start + threadIdx.x / 4;
    uint32_t bits = 0;
    if (row < end_row) {
      const auto* bytes =
          static_cast<const uint8_t*>(p.mask.data) + offset_of(p.mask, batch, head, row);
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        const int key = block * kTileN + 8 * (4 * i + quad);
        const uint32_t group = bits_of_group<kVectors>(p, bytes, key);
        any |= group != 0;
        all &= group == (key + 8 <= p.keys ? 0xffu
                         : key < p.keys    ? 0xffu >> (key + 8 - p.keys)
                                           : 0u);
        bits |= group << (8 * i);
      }
    }
    bits = transpose_pairs(bits, quad);
    if (row < end_row) {
      const int64_t at = (static_cast<int64_t>(blockIdx.z) * p.rows + row) * p.blocks + block;
      static_cast<Word*>(p.bits)[at * 4 + quad] = static_cast<Word>(bits);
    }
  }
  any = __syncthreads_or(any);
  all = __syncthreads_and(all);
  if (threadIdx.x == 0) {
    p.states[(static_cast<int64_t>(blockIdx.z) * p.tiles + tile) * p.blocks + block] =
        all   ? kBlockFull
        : any ? kBlockPartial
              : kBlockHidden;
  }
}

int64_t up(int64_t a, int64_t b) { return Count{a}.pieces(b).value(); }

}  // namespace

Status pack_mask(const Tensor& mask, const ForwardTile& tile, void* workspace, ForwardParams& a,
                 cudaStream_t stream) {
  PackParams p{};
  p.mask = a.problem.tensor[TESSERA_MASK];
  p.heads = static_cast<int>(mask.extent[1]);
  p.rows = static_cast<int>(mask.extent[2]);
  p.keys = static_cast<int>(mask.extent[3]);
  p.tile_m = tile.tile_m();
  p.tile_n = tile.tile_n;
  p.tiles = static_cast<int>(up(p.rows, p.tile_m));
  p.blocks = static_cast<int>(up(p.keys, p.tile_n));
  p.drop = (a.problem.flags & TESSERA_MASK_DROP) != 0;
  p.bits = workspace;
  p.states = static_cast<uint8_t*>(workspace) + mask_bits_bytes(mask, tile);
  a.mask_bits = workspace;
  a.mask_states = p.states;
  a.mask_rows = p.rows;
  a.mask_tiles = p.tiles;
  a.mask_blocks = p.blocks;
  a.mask_stride_head = mask.extent[1] > 1;
  a.mask_stride_batch = mask.extent[0] > 1 ? p.heads : 0;
  const bool vectors = p.mask.stride[3] == 1 && p.mask.vector_bytes >= 8;
  const auto kernel = tile.tile_n == 64 ? (vectors ? pack<64, true> : pack<64, false>)
                                        : (vectors ? pack<128, true> : pack<128, false>);
  const int64_t states = int64_t{p.heads} * p.tiles * p.blocks;  // of a sequence
  const int64_t bytes = int64_t{p.heads} * p.rows * p.blocks * p.tile_n / 8;
  return launch_by_sequences(mask, [&](int64_t first, int64_t sequences) {
    PackParams part = p;
    part.mask.data = static_cast<uint8_t*>(p.mask.data) + first * p.mask.stride[0];
    part.bits = static_cast<uint8_t*>(p.bits) + first * bytes;
    part.states = p.states + first * states;
    const dim3 grid(static_cast<unsigned>(p.blocks), static_cast<unsigned>(p.tiles),
                    static_cast<unsigned>(sequences * p.heads));
    return launch_kernel("pack_mask", reinterpret_cast<const void*>(kernel), grid, kThreads, 0,
                         &part, stream);
  });
}

}  // namespace tessera::cuda::sm90
