// SPDX-License-Identifier: Apache-2.0
//   bits [heads, rows, blocks, 4 threads of a quad] of tile_n / 4 bits each: element e of thread t
//   stands
//        at column 8 (e / 2) + 2 t + e % 2 of the block
//   states [heads, row tiles, blocks]: BlockState
//
// A CTA packs one block under one row tile, a warp 32 rows of it, a row at a time.
#include "cuda/sm90/blocks.cuh"
#include "cuda/sm90/pack_mask.h"

namespace tessera::cuda::sm90 {
namespace {

constexpr int kThreads = 128;
constexpr int kPiece =
    64;  // columns that one row of a warp packs at a time, 16 bits a thread of a quad

struct PackParams {
  View mask;
  int heads;  // of the mask; the batch axis varies slower
  int rows, keys;
  int tile_m, tile_n, tiles, blocks;
  int drop;  // true = hidden
  uint16_t* bits;
  uint8_t* states;
};

__global__ void __launch_bounds__(kThreads) pack(const PackParams p) {
  const int block = blockIdx.x, tile = blockIdx.y;
  const int batch = blockIdx.z / p.heads, head = blockIdx.z % p.heads;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int pieces = p.tile_n / kPiece;
  const int end_row = min((tile + 1) * p.tile_m, p.rows);
  bool any = false, all = true;
  for (int row = tile * p.tile_m + warp; row < end_row; row += kThreads / kWarp) {
    const auto* bytes =
        static_cast<const uint8_t*>(p.mask.data) + offset_of(p.mask, batch, head, row);
    for (int piece = 0; piece < pieces; ++piece) {
      const int column = block * p.tile_n + piece * kPiece + lane;
      const auto visible = [&](int key) {
        return key < p.keys && (bytes[key * p.mask.stride[3]] != 0) != (p.drop != 0);
      };
      const bool left = visible(column), right = visible(column + kWarp);
      any |= left || right;
      all &= (left || column >= p.keys) && (right || column + kWarp >= p.keys);
      const uint32_t words[2] = {__ballot_sync(kAllLanes, left), __ballot_sync(kAllLanes, right)};
      if (lane >= 4) continue;
      uint32_t packed = 0;
#pragma unroll
      for (int g = 0; g < kPiece / 8; ++g) {
        packed |= (words[g / 4] >> (8 * (g % 4) + 2 * lane) & 3) << (2 * g);
      }
      const int64_t at = ((static_cast<int64_t>(blockIdx.z) * p.rows + row) * p.blocks + block) * 4;
      p.bits[(at + lane) * pieces + piece] = static_cast<uint16_t>(packed);
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

int64_t up(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t bytes_of_bits(const Tensor& mask, const ForwardTile& tile) {
  const int64_t row = up(mask.extent[3], tile.tile_n) * tile.tile_n / 8;
  return up(mask.extent[0] * mask.extent[1] * mask.extent[2] * row, 16) * 16;
}

}  // namespace

int64_t packed_mask_bytes(const Tensor& mask, const ForwardTile& tile) {
  const int64_t states = mask.extent[0] * mask.extent[1] * up(mask.extent[2], tile.tile_m()) *
                         up(mask.extent[3], tile.tile_n);
  return bytes_of_bits(mask, tile) + up(states, 16) * 16;
}

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
  p.bits = static_cast<uint16_t*>(workspace);
  p.states = static_cast<uint8_t*>(workspace) + bytes_of_bits(mask, tile);
  a.mask_bits = workspace;
  a.mask_states = p.states;
  a.mask_rows = p.rows;
  a.mask_tiles = p.tiles;
  a.mask_blocks = p.blocks;
  a.mask_stride_head = mask.extent[1] > 1;
  a.mask_stride_batch = mask.extent[0] > 1 ? p.heads : 0;
  const dim3 grid(static_cast<unsigned>(p.blocks), static_cast<unsigned>(p.tiles),
                  static_cast<unsigned>(mask.extent[0] * mask.extent[1]));
  pack<<<grid, kThreads, 0, stream>>>(p);
  return cuda_status(cudaGetLastError(), "cudaLaunchKernel (pack_mask)");
}

}  // namespace tessera::cuda::sm90
