// SPDX-License-Identifier: Apache-2.0
// The loaders of keys and values in pages of E4M3: a warp each, which copies the bytes of a block and
// converts those of the block before to the type of q, where the tile of 16 bits is.
#pragma once

#include <type_traits>

#include "cuda/common/few/operands.cuh"
#include "cuda/sm90/forward/pages/rows.cuh"
#include "cuda/sm90/forward/roles.cuh"
#include "cuda/sm90/machine/copy_groups.cuh"

namespace tessera::cuda::sm90 {

// Four E4M3 as two pairs of T.
template <typename T>
__device__ __forceinline__ uint2 convert_e4m3(uint32_t bytes) {
  if constexpr (std::is_same_v<T, __half>) {
    return {halves_of_e4m3(bytes), halves_of_e4m3(bytes >> 16)};
  } else {
    // The exponent and the mantissa where bf16 has its own, whose bias is larger by 120.
    constexpr uint32_t kSign = 0x80008000, kRest = 0x07f007f0, kTwoTo120 = 0x7b807b80;
    const auto of_pair = [](uint32_t pair) {
      const uint32_t small = (pair & kSign) | (pair >> 4 & kRest);
      uint32_t x;
      asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(x) : "r"(small), "r"(kTwoTo120));
      return x;
    };
    return {of_pair(__byte_perm(bytes, 0, 0x1404)), of_pair(__byte_perm(bytes, 0, 0x3424))};
  }
}

// Makes NaN of the T whose byte was one: there convert_e4m3() has made a number of it.
template <typename T>
__device__ __forceinline__ void keep_nan(uint32_t bytes, uint2& x) {
  const auto of_pair = [](uint32_t pair, uint32_t& y) {
    if ((pair & 0x7f) == 0x7f) y |= 0x7fff;
    if ((pair & 0x7f00) == 0x7f00) y |= 0x7fff0000;
  };
  of_pair(bytes, x.x);
  of_pair(bytes >> 16, x.y);
}

// A block of kRows rows of bytes, kColumns each, to a Tile, by a warp. Which of a lane's two units of a row
// comes first depends on the chunk, so that the lanes of a row write to banks of their own.
template <typename T, typename Tile, int kRows, int kColumns>
__device__ __forceinline__ void convert_block(uint32_t raw, uint32_t to, int lane) {
  constexpr int kBytes = 16, kUnits = kColumns / kBytes, kChunkUnits = kChunkRowBytes / kBytes;
#pragma unroll 4  // latency binds: a warp converts alone
  for (int i = lane; i < kRows * kUnits; i += kWarp) {
    const int row = i / kUnits, unit = i % kUnits * 2;
    uint32_t words[4];
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(raw + i * kBytes));
    uint2 x[4];
    uint32_t nan = 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      x[k] = convert_e4m3<T>(words[k]);
      nan |= (words[k] & 0x7f7f7f7f) + 0x01010101;  // carries into the sign of a byte that is NaN
    }
    if (std::is_same_v<T, __nv_bfloat16> && nan & 0x80808080) {
#pragma unroll
      for (int k = 0; k < 4; ++k) keep_nan<T>(words[k], x[k]);
    }
    const bool second = unit / kChunkUnits % 2;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const bool high = k ^ second;
      const uint2 a = high ? x[2] : x[0], b = high ? x[3] : x[1];
      asm volatile(
          "st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(Tile::unit(to, row, unit + high)),
          "r"(a.x), "r"(a.y), "r"(b.x), "r"(b.y)
          : "memory");
    }
  }
}

// All blocks of all tiles. of: 0 for K, 1 for V. on_block: called where a block is on its way.
template <typename T, TiledKernel Kernel, typename Tile, int kTable, int kStages, typename OnBlock>
__device__ __forceinline__ void convert_pages(const PagedForwardParams& a,
                                              const typename Kernel::Work* works,
                                              const typename Kernel::Shared shared,
                                              const StageBarriers<kStages>& barriers,
                                              uint32_t first, int of, int columns,
                                              const OnBlock& on_block) {
  constexpr int kColumns = Kernel::kTile.dqk, kBytes = 16;
  constexpr int kLanesOfRow = kColumns / kBytes, kRowsAtOnce = kWarp / kLanesOfRow;
  using Rows = PageRows<Kernel::kTileN, kTable>;
  const int lane = threadIdx.x % kWarp, unit = lane % kLanesOfRow, row0 = lane / kLanesOfRow;
  const View& pool = a.problem.tensor[kTable == TESSERA_PAGE_TABLE_K ? TESSERA_K : TESSERA_V];
  const auto tiles = shared.work_barriers();
  Ring<kStages> ring;
  int started = 0, handed_over = 0;  // blocks
  const auto hand_over = [&](int left) {
    if (started - handed_over <= left) return;
    left == 0 ? copy_async_wait_but<0>(0) : copy_async_wait_but<1>(1);
    __syncwarp();
    mbarrier_wait(barriers.empty(ring.stage), ring.phase ^ 1);
    convert_block<T, Tile, Kernel::kTileN, kColumns>(shared.raw(of, handed_over % 2),
                                                     first + ring.stage * Tile::kBytes, lane);
    __syncwarp();
    if (lane == 0) mbarrier_arrive(barriers.full(ring.stage));
    ring.advance();
    ++handed_over;
  };
  for (Ring<Kernel::kWorkStages> tile;; tile.advance()) {
    tiles.wait(tile);
    const auto& work = works[tile.stage];
    if (work.last) return;
    wait_for_predecessors();
    const char* from = static_cast<const char*>(pool.data) +
                       work.head / a.problem.group * pool.stride[2] + unit * kBytes;
    asm("" : "+l"(from));  // one pointer: from its parts each row would add them up
    Rows rows(a, work.n, keys_seen<Kernel::kTileM>(work), work.end - 1, lane);
#pragma unroll 1
    for (int j = work.end - 1; j >= work.begin; --j) {
      uint32_t at[Rows::kKeysOfLane];
      rows.next(at);
      const uint32_t to = shared.raw(of, started % 2) + lane * kBytes;
#pragma unroll
      for (int i = 0; i < Rows::kKeysOfLane; ++i) {
#pragma unroll 2
        for (int r = 0; r < kWarp; r += kRowsAtOnce) {
          const uint32_t units = __shfl_sync(kAllLanes, at[i], r + row0);
          const bool copies = units != RowCopies::kNone && unit * kBytes < columns;
          copy_async(to + (i * kWarp + r) * kColumns, from + int64_t{units} * kBytes,
                     copies ? kBytes : 0);
        }
      }
      copy_async_commit();
      ++started;
      on_block();
      hand_over(1);
    }
    hand_over(0);
    __syncwarp();
    if (lane == 0) tiles.release(tile);
  }
}

template <typename T, TiledKernel Kernel>
__device__ __forceinline__ void convert_paged_keys(const PagedForwardParams& a,
                                                   const typename Kernel::Work* works,
                                                   volatile int& blocks_loaded,
                                                   const typename Kernel::Shared shared) {
  int loaded = 0;
  convert_pages<T, Kernel, typename Kernel::KTile, TESSERA_PAGE_TABLE_K>(
      a, works, shared, shared.k_barriers(), shared.k(0), 0, a.problem.dqk, [&] {
        if (threadIdx.x % kWarp == 0) blocks_loaded = ++loaded;
      });
}
template <typename T, TiledKernel Kernel>
__device__ __forceinline__ void convert_paged_values(const PagedForwardParams& a,
                                                     const typename Kernel::Work* works,
                                                     const typename Kernel::Shared shared) {
  convert_pages<T, Kernel, typename Kernel::VTile, TESSERA_PAGE_TABLE_V>(
      a, works, shared, shared.v_barriers(), shared.v(0), 1, a.problem.dv, [] {});
}

}  // namespace tessera::cuda::sm90
