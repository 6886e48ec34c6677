// SPDX-License-Identifier: Apache-2.0
// A CTA packs one tile of 128 keys beside one block of queries, 64 queries at a time, a warp 16
// keys of them: bytes are read along the keys, and bits leave along the threads.
#include "core/count.h"
#include "cuda/common/element.cuh"
#include "cuda/common/score/block_map.h"
#include "cuda/sm90/backward/score/pack_mask.h"
#include "cuda/sm90/machine/ptx.cuh"
#include "cuda/sm90/score/mask_launch.h"

namespace tessera::cuda::sm90 {
namespace {

constexpr int kKeys = kKeysOfPiece, kQueries = kQueriesOfPiece, kKeysOfWarp = 16;
constexpr int kThreads = kKeys / kKeysOfWarp * 32;
constexpr int kPitch = kKeys + 8;  // bytes; the four threads of a quad read different banks
constexpr int kVector = 8;         // keys that a thread reads at once

struct PackParams {
  View mask;
  int heads;  // of the mask; the batch axis varies slower
  int queries, keys;
  int pieces, pieces_of_block, rows, tiles, blocks;
  int drop;  // true = hidden
  uint32_t* bits;
  uint8_t* states;
};

// Bytes of ones and zeros: which bytes of the word are not 0.
__device__ __forceinline__ uint32_t ones_of_bytes(uint32_t word) {
  return (((word & 0x7f7f7f7fu) + 0x7f7f7f7fu) | word) >> 7 & 0x01010101u;
}

// A byte for each of 8 keys from `key` on, of which `exist` do. dense: the row has no gaps and is
// aligned to 8 bytes.
__device__ __forceinline__ uint2 visible_keys(const PackParams& p, const uint8_t* row, int key,
                                              int exist, bool dense) {
  uint32_t shows[2] = {};
  if (dense && exist == kVector) {
    const uint2 bytes = *reinterpret_cast<const uint2*>(row + key);
    shows[0] = ones_of_bytes(bytes.x), shows[1] = ones_of_bytes(bytes.y);
    if (p.drop) shows[0] ^= 0x01010101u, shows[1] ^= 0x01010101u;
  } else {
    for (int i = 0; i < exist; ++i) {
      const bool is_set = row[(key + i) * p.mask.stride[3]] != 0;
      shows[i / 4] |= static_cast<uint32_t>(is_set != (p.drop != 0)) << 8 * (i % 4);
    }
  }
  return {shows[0], shows[1]};
}

__global__ void __launch_bounds__(kThreads) pack(const PackParams p) {
  __shared__ alignas(8) uint8_t visible[kQueries * kPitch];
  const int tile = blockIdx.x, block = blockIdx.y;
  const int batch = blockIdx.z / p.heads, head = blockIdx.z % p.heads;
  const int thread = threadIdx.x, lane = thread % kWarp, warp = thread / kWarp;
  const bool dense = p.mask.stride[3] == 1 && p.mask.vector_bytes >= kVector;
  bool any = false, all = true;
  for (int i = 0; i < p.pieces_of_block; ++i) {
    const int piece = block * p.pieces_of_block + i;
    const int column = thread % (kKeys / kVector) * kVector, key = tile * kKeys + column;
    const int exist = min(max(p.keys - key, 0), kVector);
#pragma unroll
    for (int row = thread / (kKeys / kVector); row < kQueries;
         row += kThreads / (kKeys / kVector)) {
      const int query = piece * kQueries + row;
      uint2 shows{};
      if (query < p.queries) {
        const auto* bytes =
            static_cast<const uint8_t*>(p.mask.data) + offset_of(p.mask, batch, head, query);
        shows = visible_keys(p, bytes, key, exist, dense);
        const int count = __popc(shows.x) + __popc(shows.y);
        any |= count > 0;
        all &= count == exist;
      }
      *reinterpret_cast<uint2*>(visible + row * kPitch + column) = shows;
    }
    __syncthreads();
    uint32_t packed = 0;
#pragma unroll
    for (int e = 0; e < 32; ++e) {  // bit e % 16 of key e / 16
      const int row = 8 * (e % 16 / 2) + 2 * (lane % 4) + e % 2;
      const int column = warp * kKeysOfWarp + lane / 4 + e / 16 * 8;
      packed |= static_cast<uint32_t>(visible[row * kPitch + column]) << e;
    }
    if (piece < p.pieces) {
      const int64_t row =
          (int64_t{blockIdx.z} * p.pieces + piece) * p.rows + tile * (kKeys / kKeysOfWarp) + warp;
      p.bits[row * kWarp + lane] = packed;
    }
    __syncthreads();
  }
  any = __syncthreads_or(any);
  all = __syncthreads_and(all);
  if (thread == 0) {
    p.states[(int64_t{blockIdx.z} * p.tiles + tile) * p.blocks + block] = all   ? kBlockFull
                                                                          : any ? kBlockPartial
                                                                                : kBlockHidden;
  }
}

int64_t up(int64_t a, int64_t b) { return Count{a}.pieces(b).value(); }

}  // namespace

Status pack_backward_mask(const Tensor& mask, const BackwardTile& tile, void* workspace,
                          BackwardParams& a, cudaStream_t stream) {
  PackParams p{};
  p.mask = a.problem.tensor[TESSERA_MASK];
  p.heads = static_cast<int>(mask.extent[1]);
  p.queries = static_cast<int>(mask.extent[2]);
  p.keys = static_cast<int>(mask.extent[3]);
  p.pieces = static_cast<int>(up(p.queries, kQueries));
  p.pieces_of_block = tile.tile_m / kQueries;
  p.tiles = static_cast<int>(up(p.keys, kKeys));
  p.rows = p.tiles * (kKeys / kKeysOfWarp);
  p.blocks = static_cast<int>(up(p.queries, tile.tile_m));
  p.drop = (a.problem.flags & TESSERA_MASK_DROP) != 0;
  p.bits = static_cast<uint32_t*>(workspace);
  p.states = static_cast<uint8_t*>(workspace) + backward_mask_bits_bytes(mask);
  a.mask_bits = p.bits;
  a.mask_states = p.states;
  a.mask_pieces = p.pieces;
  a.mask_rows = p.rows;
  a.mask_tiles = p.tiles;
  a.mask_blocks = p.blocks;
  a.mask_stride_head = mask.extent[1] > 1;
  a.mask_stride_batch = mask.extent[0] > 1 ? p.heads : 0;
  const int64_t states = int64_t{p.heads} * p.tiles * p.blocks;  // of a sequence
  const int64_t words = int64_t{p.heads} * p.pieces * p.rows * kWarp;
  return launch_by_sequences(mask, [&](int64_t first, int64_t sequences) {
    PackParams part = p;
    part.mask.data = static_cast<uint8_t*>(p.mask.data) + first * p.mask.stride[0];
    part.bits = p.bits + first * words;
    part.states = p.states + first * states;
    const dim3 grid(static_cast<unsigned>(p.tiles), static_cast<unsigned>(p.blocks),
                    static_cast<unsigned>(sequences * p.heads));
    return launch_kernel("pack_backward_mask", reinterpret_cast<const void*>(&pack), grid, kThreads,
                         0, &part, stream);
  });
}

}  // namespace tessera::cuda::sm90
