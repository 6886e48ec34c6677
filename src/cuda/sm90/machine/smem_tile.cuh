// SPDX-License-Identifier: Apache-2.0
// A [rows, columns] tile of 16-bit elements in shared memory, as TMA writes it and wgmma reads it.
//
// The tile is a sequence of chunks of 64 columns; a chunk is [rows][128 bytes] with the 128-byte
// swizzle: the 16-byte unit u of row r lies at unit u ^ (r % 8). Chunks start at multiples of 1024
// bytes, which is why rows % 8 == 0. Columns are padded to whole chunks; TMA fills them with zeros.
#pragma once

#include "cuda/sm90/machine/ptx.cuh"
#include "cuda/sm90/machine/wgmma.cuh"

namespace tessera::cuda::sm90 {

constexpr int kChunkColumns = 64;
constexpr int kChunkRowBytes = 128;
constexpr int kStepK = 16;  // of a 16-bit wgmma

template <int kRows, int kColumns>
struct SmemTile {
  static_assert(kRows % 8 == 0 && kRows <= 256 && kColumns % kStepK == 0);
  static constexpr int kChunks = (kColumns + kChunkColumns - 1) / kChunkColumns;
  static constexpr int kChunkBytes = kRows * kChunkRowBytes;
  static constexpr int kBytes = kChunks * kChunkBytes;
  static constexpr int kStepsPerChunk = kChunkColumns / kStepK;

  // Describes the tile as a k-major operand, whose k axis is the columns. Descriptors count in
  // units of 16 bytes.
  static __device__ __forceinline__ uint64_t k_major(uint32_t tile) {
    return smem_descriptor(tile, 16, 8 * kChunkRowBytes);
  }
  static __host__ __device__ constexpr uint32_t k_major_step(int step) {
    return (step / kStepsPerChunk * kChunkBytes + step % kStepsPerChunk * kStepK * 2) >> 4;
  }

  // Describes the tile as an mn-major operand, whose k axis is the rows.
  static __device__ __forceinline__ uint64_t mn_major(uint32_t tile) {
    return smem_descriptor(tile, kChunkBytes, 8 * kChunkRowBytes);
  }
  static __host__ __device__ constexpr uint32_t mn_major_step(int step) {
    return step * kStepK * kChunkRowBytes >> 4;
  }

  // The 16 bytes at (row, 8 * unit).
  static __device__ __forceinline__ uint32_t unit(uint32_t tile, int row, int unit) {
    return tile + unit / 8 * kChunkBytes + row * kChunkRowBytes + ((unit % 8 ^ row % 8) << 4);
  }

  // All columns of 64 rows as A registers of wgmma: a[4 s .. 4 s + 3] belong to k16 step s.
  static __device__ __forceinline__ void load_a(uint32_t tile, int first_row, int thread,
                                                uint32_t (&a)[kColumns / 4]) {
    const int lane = thread % kWarp;
    const int row = first_row + thread / kWarp * 16 + lane % 16;
#pragma unroll
    for (int step = 0; step < kColumns / kStepK; ++step) {
      uint32_t r[4];
      ldmatrix_x4(r, unit(tile, row, 2 * step + lane / 16));
#pragma unroll
      for (int i = 0; i < 4; ++i) a[4 * step + i] = r[i];
    }
  }

  // The tile from a tensor map made for it (machine/tensormap.h): one box a chunk, of the first
  // `chunks`.
  static __device__ __forceinline__ void load(uint32_t tile, const CUtensorMap* map,
                                              uint32_t barrier, int head, int c2, int c3, int batch,
                                              int chunks = kChunks) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      if (chunk >= chunks) break;
      tma_load(tile + chunk * kChunkBytes, map, barrier, chunk * kChunkColumns, head, c2, c3,
               batch);
    }
  }
};

}  // namespace tessera::cuda::sm90
