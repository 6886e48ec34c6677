// SPDX-License-Identifier: Apache-2.0
// Adds a bias to a block of scores: from tiles that TMA brings to shared memory, or, where TMA
// cannot read it (fp32, unaligned rows, one value a row), by plain loads. Fragments as in
// forward/score/features.cuh.
#pragma once

#include "cuda/common/element.cuh"
#include "cuda/sm90/forward/schedule.cuh"
#include "cuda/sm90/machine/fragment.cuh"
#include "cuda/sm90/machine/pipeline.cuh"
#include "cuda/sm90/machine/smem_tile.cuh"
#include "cuda/sm90/score/bias.cuh"

namespace tessera::cuda::sm90 {

// The bias of a consumer's 64 rows and one block of keys, as the producer left it.
template <int kTileN>
struct BiasStage {
  using Tile = SmemTile<64, kTileN>;
  uint32_t tile;
  StageBarriers<1> barriers;
  Ring<1> ring;  // the consumer's

  // Loads rows from m0 and keys from n0 on; called by the producer. Columns past the tensor stay
  // what they are; lengths hide them.
  __device__ __forceinline__ void load(const ForwardParams& a, const Ring<1>& producer, int n,
                                       int head, int m0, int n0) const {
    const int chunks = min(kTileN, a.bias_columns - n0 + kChunkColumns - 1) / kChunkColumns;
    barriers.acquire(producer, chunks * Tile::kChunkBytes);
    for (int chunk = 0; chunk < chunks; ++chunk) {
      tma_load(tile + chunk * Tile::kChunkBytes, &a.bias, barriers.full(0),
               n0 + chunk * kChunkColumns, head * a.bias_factor_head, m0, 0,
               n * a.bias_factor_batch);
    }
  }

  // S = c S + bias, by all threads of the consumer.
  template <typename Element>
  __device__ __forceinline__ void add(int thread, float c, float (&S)[kTileN / 2]) {
    const int lane = thread % kWarp, row = thread / kWarp * 16 + lane % 16;
    barriers.wait(ring);
#pragma unroll
    for (int step = 0; step < kTileN / kStepK; ++step) {
      uint32_t pair[4];  // of rows 0 and 1 of group 2 step, then of the next one
      ldmatrix_x4(pair, Tile::unit(tile, row, 2 * step + lane / 16));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float* s = S + 8 * step + 2 * i;
        s[0] = fmaf(s[0], c, low_element<Element>(pair[i]));
        s[1] = fmaf(s[1], c, high_element<Element>(pair[i]));
      }
    }
    __syncwarp();
    if (lane == 0) barriers.release(ring);
    ring.advance();
  }
};

template <typename Element, int kTileN>
struct PlainBias {
  const Params& p;
  const Work& work;
  int row, quad;  // of the thread

  // S = c S + bias.
  __device__ __forceinline__ void add(int block, float c, float (&S)[kTileN / 2]) const {
    const View& view = p.tensor[TESSERA_BIAS];
    if (view.dtype == TESSERA_FP32) {
      add_elements<float>(block, c, S);
    } else if (view.vector_bytes == 16 && view.stride[3] == 1) {
      add_vectors(block, c, S);
    } else {
      add_elements<Element>(block, c, S);
    }
  }

 private:
  template <typename Bias>
  __device__ __forceinline__ const Bias* row_of_bias(int r) const {
    const View& view = p.tensor[TESSERA_BIAS];
    return static_cast<const Bias*>(view.data) + offset_of(view, work.n, work.head, row + 8 * r);
  }
  // Columns of the row that may be read.
  __device__ __forceinline__ int end(int r) const {
    return work.exists(row + 8 * r) ? work.k.length : 0;
  }

  // Each thread of a quad loads 8 columns of every fourth group and trades them for 2 of each.
  __device__ __forceinline__ void add_vectors(int block, float c, float (&S)[kTileN / 2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const auto* bias = row_of_bias<uint16_t>(r);
      const int last = end(r);
#pragma unroll
      for (int g = 0; g < kTileN / 8; g += 4) {
        const int key = block * kTileN + 8 * (g + quad);
        uint32_t x[4] = {};
        if (key + 8 <= last) {
          const uint4 v = *reinterpret_cast<const uint4*>(bias + key);
          x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
        } else {
#pragma unroll
          for (int i = 0; i < 7; ++i) {
            if (key + i < last) x[i / 2] |= static_cast<uint32_t>(bias[key + i]) << (i % 2 * 16);
          }
        }
        transpose_quad(x, quad);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float* s = S + 4 * (g + i) + 2 * r;
          s[0] = fmaf(s[0], c, low_element<Element>(x[i]));
          s[1] = fmaf(s[1], c, high_element<Element>(x[i]));
        }
      }
    }
  }

  template <typename Bias>
  __device__ __forceinline__ void add_elements(int block, float c, float (&S)[kTileN / 2]) const {
    const int column = block * kTileN + 2 * quad;
    const bool one_value = p.tensor[TESSERA_BIAS].stride[3] == 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const auto* bias = row_of_bias<Bias>(r);
      const int last = end(r);
#pragma unroll
      for (int e = 0; e < kTileN / 4; ++e) {
        const int key = column + 8 * (e / 2) + e % 2;
        const float x = key < last ? static_cast<float>(bias[one_value ? 0 : key]) : 0.f;
        float& s = S[4 * (e / 2) + 2 * r + e % 2];
        s = fmaf(s, c, x);
        if (e % kLoadsAtOnce == kLoadsAtOnce - 1) no_loads_across();
      }
    }
  }
};

}  // namespace tessera::cuda::sm90
