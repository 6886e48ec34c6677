// SPDX-License-Identifier: Apache-2.0
// ALiBi by the tensor cores, and the order of blocks that suits it; for the kernel of ALiBi alone.
//
// Left of the diagonal it adds slope r to the score of a block's key r, and a number of the whole
// block; right of it -slope r, and a number of the row. The part with r is one more k16 step of
// Q K^T, from two operands of its own in shared memory:
//   K' [tile_n, 16]  row r: three times r, then zeros; written once a kernel
//   Q' [64, 16]      every row: the slope in three pieces, whose sum has 24 bits, then zeros;
//                    written once a tile, and once more with the signs changed
// The other number joins the reference of the exponents. So no score needs an instruction more.
//
// A loop that does not look for maxima (forward/kernel.cuh) wants the largest scores first. They
// stand at the diagonal, or where the slope is negative at the far end.
#pragma once

#include <cmath>

#include "cuda/common/element.cuh"
#include "cuda/sm90/forward/schedule.cuh"
#include "cuda/sm90/machine/ptx.cuh"
#include "cuda/sm90/machine/wgmma.cuh"

namespace tessera::cuda::sm90 {

// A tile whose blocks are taken from `pivot` on to the left, then those right of it.
struct PivotedWork : Work {
  int pivot;  // begin - 1: all from left to right

  __device__ __forceinline__ void choose_pivot(int tile_m, int tile_n) {
    const int diagonal = max(m0 + tile_m - 1 + band.shift, begin * tile_n) / tile_n;
    pivot = slope < 0 ? begin - 1 : min(diagonal, end - 1);
  }
  __device__ __forceinline__ int last_block() const { return pivot < end - 1 ? end - 1 : begin; }

  // Blocks before the first one lie left of the diagonal of all rows, those from the second one on
  // right of it.
  __device__ __forceinline__ int left_end(int tile_n) const {
    return max(m0 + band.shift + 1, 0) / tile_n;
  }
  __device__ __forceinline__ int right_begin(int tile_m, int tile_n) const {
    return (max(m0 + tile_m - 1 + band.shift, 0) + tile_n - 1) / tile_n;
  }
  // What ALiBi adds there to all scores of a row, beside +-slope times the key's index in the
  // block; as in Features::row_offset().
  __device__ __forceinline__ float base(int first_key, bool right, int row) const {
    const float base = slope * static_cast<float>(first_key - m0 - band.shift);
    return right ? 2 * slope * static_cast<float>(row - m0) - base : base;
  }
};

// The block at place i of a tile's order, which begins with place end - 1 and ends with begin.
__device__ __forceinline__ int block_at(const Work&, int i) { return i; }
__device__ __forceinline__ int block_at(const PivotedWork& work, int i) {
  const int done = work.end - 1 - i;
  return done <= work.pivot - work.begin ? work.pivot - done : work.begin + done;
}

// The operands K' ("indices") and Q' ("slopes"), which add slope * r to a block of scores; and the
// walk over a tile's blocks that uses them.
template <typename Element, int kTileM, int kTileN>
struct Progression {
  static constexpr int kUnit = 16;  // bytes: 8 of a row's 16 columns
  static constexpr int kRows = 64;  // of a consumer
  static constexpr int kIndexBytes = 2 * kTileN * kUnit;
  static constexpr int kSlopeBytes = 4 * kRows * kUnit;  // the slope and its negative
  static constexpr float kSteepest = 32768;              // for 16 bits; a NaN is steeper

  static __device__ __forceinline__ bool holds(float slope) { return fabsf(slope) <= kSteepest; }

  static __device__ __forceinline__ uint64_t indices(uint32_t tile) {
    return unswizzled_descriptor(tile, kTileN * kUnit, 8 * kUnit);
  }
  static __device__ __forceinline__ uint64_t slope(uint32_t tiles, bool right) {
    return unswizzled_descriptor(tiles + right * kSlopeBytes / 2, kRows * kUnit, 8 * kUnit);
  }

  // Called by the threads of a CTA.
  static __device__ __forceinline__ void fill_indices(uint32_t tile) {
    for (int r = threadIdx.x; r < 2 * kTileN; r += blockDim.x) {
      const float x = r < kTileN ? static_cast<float>(r) : 0.f;
      store_shared(tile + r * kUnit, uint4{pack<Element>(x, x), pack<Element>(x, 0.f), 0, 0});
    }
    async_proxy_fence();
  }
  // Called by the lanes of a warp.
  static __device__ __forceinline__ void fill_slopes(uint32_t tiles, float slope, int lane) {
    const float x = holds(slope) ? slope : 0.f;
    const float high = rounded(x), middle = rounded(x - high), low = x - high - middle;
    for (int r = lane; r < 4 * kRows; r += kWarp) {
      const float sign = r < 2 * kRows ? 1.f : -1.f;
      const uint4 pieces{pack<Element>(sign * high, sign * middle), pack<Element>(sign * low, 0.f),
                         0, 0};
      store_shared(tiles + r * kUnit, r / kRows % 2 == 0 ? pieces : uint4{});
    }
    async_proxy_fence();
  }

  // Calls step(j, linear, right) for the blocks of a tile in their order, but for the first one.
  // linear: on one side of the diagonal and not cut by the band; there the products add to scores.
  // blocks: of the work, and [clean_begin, clean_end) within them.
  template <typename Blocks, typename Step>
  static __device__ __forceinline__ void walk(const PivotedWork& work, const Blocks& blocks,
                                              const Step& step) {
#pragma unroll 1
    for (int way = -1; way <= 1; way += 2) {  // to the left of the pivot, then to the right
      const bool right = way > 0 && work.slope >= 0;
      const int lo =
          right ? max(blocks.clean_begin, work.right_begin(kTileM, kTileN)) : blocks.clean_begin;
      const int left_end = right ? blocks.end : work.left_end(kTileN);
      const int hi = holds(work.slope) ? min(blocks.clean_end, left_end) : lo;
      const int stop = way < 0 ? blocks.begin - 1 : blocks.end;
      int j = uniform(way < 0 ? max(work.pivot - 1, stop) : max(work.pivot, blocks.begin) + 1);
      const int near = uniform(way < 0 ? min(max(hi - 1, stop), j) : max(min(lo, stop), j));
      const int far = uniform(way < 0 ? min(max(lo - 1, stop), near) : max(min(hi, stop), near));
#pragma unroll 1
      for (; j != near; j += way) step(j, false, false);
#pragma unroll 1
      for (; j != far; j += way) step(j, true, right);
#pragma unroll 1
      for (; j != stop; j += way) step(j, false, false);
    }
  }

 private:
  static __device__ __forceinline__ float rounded(float x) {
    return static_cast<float>(static_cast<Element>(x));
  }
};

}  // namespace tessera::cuda::sm90
