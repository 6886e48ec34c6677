// SPDX-License-Identifier: Apache-2.0
// dbias inside of the fused backward kernel, for biases whose elements are summed over a few
// sequences at most: dS is there, in registers. A CTA walks its tile of keys for one sequence after
// the other; the first stores what it finds, the others add to it what is theirs, by TMA. An
// element belongs to one CTA, so that the order of its sum is fixed and nobody waits for anybody.
//
// A warpgroup writes its dS transposed, [64 queries][64 keys], to a tile of shared memory of its
// own; one thread sends it while the products of dQ, dV and dK run.
#pragma once

#include "cuda/common/element.cuh"
#include "cuda/sm90/backward_params.h"
#include "cuda/sm90/backward_schedule.cuh"
#include "cuda/sm90/backward_tiles.h"
#include "cuda/sm90/ptx.cuh"
#include "cuda/sm90/smem_tile.cuh"

namespace tessera::cuda::sm90 {

// Of a row of backward_tiles.def.
template <typename Row>
inline constexpr bool kSumsBias = (Row::kFeatures & kGradientOfBias) != 0;

template <typename Element>
class BiasGradient {
 public:
  static constexpr int kQueries = 64, kKeys = 64;
  using Tile = SmemTile<kQueries, kKeys>;

  // tile: address of a Tile of the warpgroup, which has the keys from key0 on.
  __device__ __forceinline__ BiasGradient(const BackwardParams& a, const KeyTile& tile,
                                          int warpgroup, uint32_t staging)
      : a_(a), tile_(tile), warpgroup_(warpgroup), staging_(staging) {}

  // What was sent last has been read from shared memory: by all threads, before stage().
  __device__ __forceinline__ void acquire() const {
    if (is_sender()) bulk_wait_read();
    sync();
  }

  // dS: as the products take it, of the warp's 16 keys and the block's queries.
  __device__ __forceinline__ void stage(const uint32_t (&dS)[kQueries / 4]) const {
    const int lane = threadIdx.x % kWarp, row = lane % 8;
    const int unit = threadIdx.x % kWarpgroup / kWarp * 2 + lane / 8 % 2;
    const uint32_t to = Tile::unit(staging_, lane / 16 * 8 + row, unit);
#pragma unroll
    for (int i = 0; i < kQueries / 16; ++i) {
      stmatrix_x4_transposed(to + i * 16 * kChunkRowBytes, dS + 4 * i);
    }
  }

  // Behind an async_proxy_fence() of all threads.
  __device__ __forceinline__ void send(int head, int block) const {
    sync();
    if (!is_sender()) return;
    const int key = tile_.key0 + warpgroup_ * kKeys, query = block * kQueries;
    if (key >= tile_.k.length) return;
    if (a_.sequences > 1 && tile_.n > 0) {
      tma_add(&a_.grad_bias, staging_, key, head, query, 0, 0);
    } else {
      const bool per_sequence = a_.problem.tensor[TESSERA_DBIAS].stride[0] != 0;
      tma_store(&a_.grad_bias, staging_, key, head, query, 0, per_sequence ? tile_.n : 0);
    }
    bulk_commit();
  }

  // All that was sent is in memory.
  __device__ __forceinline__ void finish() const {
    if (is_sender()) bulk_wait();
  }

  // By 96 threads, `thread` of them: zeros in the blocks of all heads that no key of the tile is
  // seen from.
  template <int kTileN>
  static __device__ __forceinline__ void clear_unseen(const BackwardParams& a, const KeyTile& tile,
                                                      int thread) {
    constexpr int kUnits = kTileN / 8, kRows = 96 / kUnits;
    const View& view = a.problem.tensor[TESSERA_DBIAS];
    const int key = tile.key0 + 8 * (thread % kUnits), keys = tile.k.length - key;
    const int begin = tile.begin * kQueries, end = tile.begin < tile.end ? tile.end * kQueries : 0;
    for (int member = 0; member < a.problem.group; ++member) {
      Element* head = static_cast<Element*>(view.data) +
                      offset_of(view, tile.n, tile.kv_head * a.problem.group + member, 0, key);
      for (int row = thread / kUnits; row < tile.q.length; row += kRows) {
        if (row >= begin && row < end) row += (end - row + kRows - 1) / kRows * kRows;
        if (row >= tile.q.length) break;
        Element* to = head + row * view.stride[2];
        if (keys >= 8) {
          *reinterpret_cast<uint4*>(to) = uint4{};
        } else {
          for (int i = 0; i < keys; ++i) to[i] = Element{};
        }
      }
    }
  }

 private:
  __device__ __forceinline__ bool is_sender() const { return threadIdx.x % kWarpgroup == 0; }
  __device__ __forceinline__ void sync() const { named_barrier_sync(1 + warpgroup_, kWarpgroup); }

  const BackwardParams& a_;
  const KeyTile& tile_;
  const int warpgroup_;
  const uint32_t staging_;
};

}  // namespace tessera::cuda::sm90
