// SPDX-License-Identifier: Apache-2.0
// What the backward kernels share: where rows are for TMA, exponentials, the band, and how finished
// rows of gradients reach memory.
#pragma once

#include <type_traits>

#include "cuda/common/element.cuh"
#include "cuda/sm90/backward/schedule/schedule.cuh"
#include "cuda/sm90/machine/fragment.cuh"
#include "cuda/sm90/machine/ptx.cuh"
#include "cuda/sm90/machine/ragged.h"
#include "cuda/sm90/machine/smem_tile.cuh"

namespace tessera::cuda::sm90 {

// A kernel of all three gradients: a Backward (backward/fused/shape.cuh) or a BackwardPair. A
// kernel that names a part of its own, before it is complete, does not ask for it.
template <typename T>
concept GradientKernel = requires {
  typename T::Schedule;
  typename T::Blocks;
  typename T::SharedStorage;
  T::kTileM;        // queries of a block
  T::kTileN;        // keys of a tile
  T::kBlockOfDq;    // floats in the sums of a block's dQ
  T::kPartOfDq;     // in a part of them, which a warpgroup has
  T::kColumnsOfDq;  // columns of a part
  T::kSplitsRows;   // parts are of rows
};

// The two elements that pack() has put into a register.
template <typename Element>
__device__ __forceinline__ float2 unpack(uint32_t packed) {
  if constexpr (std::is_same_v<Element, __half>) {
    return __half22float2(reinterpret_cast<const __half2&>(packed));
  } else {
    return {__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000u)};
  }
}

// Zeros in the fragment of S^T or P^T where the bits of a thread's two keys are clear: bit e is of
// the e-th of its queries. Key by key, so that seven bits become predicates at once.
template <int kElements>
__device__ __forceinline__ void zero_unseen(const uint32_t (&visible)[2], float (&S)[kElements]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int e = 0; e < kElements / 2; ++e) {
      float& s = S[4 * (e / 2) + 2 * r + e % 2];
      s = visible[r] >> e & 1 ? s : 0.f;
    }
  }
}

// The place of row `row` of a side for a tensor map.
__device__ __forceinline__ MapRow map_row(int reach, const Rows& rows, int row) {
  return map_row(reach, rows.first, rows.length, row);
}

// A box wholly outside a ragged map faults: one that would be starts at the last row instead. What
// it brings is hidden, and finite.
__device__ __forceinline__ MapRow existing_row(int reach, const Rows& rows, int row) {
  return map_row(reach, rows, min(row, rows.length - 1));
}

// Row r (0, or 1: eight rows below) of a fragment of kN columns, times factor, to a row of 16-bit
// elements. Called by all lanes; the four threads of a quad trade pairs of columns for 16 bytes.
template <typename Element, int kN>
__device__ __forceinline__ void store_row(Element* row, bool stored, int first, int columns,
                                          float factor, const float (&d)[kN / 2], int r, int lane) {
  const int quad = lane % 4;
#pragma unroll
  for (int g = 0; g < kN / 8; g += 4) {
    uint32_t x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* pair = d + 4 * (g + i) + 2 * r;
      x[i] = pack<Element>(pair[0] * factor, pair[1] * factor);
    }
    transpose_quad(x, quad);
    const int column = first + 8 * (g + quad);
    if (stored && column < columns) {
      *reinterpret_cast<uint4*>(row + column) = uint4{x[0], x[1], x[2], x[3]};
    }
  }
}

// dK or dV of the keys `key` and key + 8, to the gradient's own layout; zeros of keys that the
// sequence does not have. Called by all lanes.
template <typename Element, int kCount>
__device__ __forceinline__ void store_gradient(const Params& p, int index, const KeyTile& tile,
                                               int key, float factor, int columns,
                                               float (&d)[kCount]) {
  const View& view = p.tensor[index];
  if (!view.data) return;
  keep_rows(key < tile.k.length, key + 8 < tile.k.length, d);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = key + 8 * r;
    Element* to = static_cast<Element*>(view.data) +
                  offset_of(view, tile.k.batch, tile.k.first + row, tile.kv_head);
    store_row<Element, 2 * kCount>(to, tile.owns(row), 0, columns, factor, d, r,
                                   threadIdx.x % kWarp);
  }
}

// True if the warp's 16 rows from `key` on may leave by TMA: what is past the tensor's end it
// leaves out, but where the rows of a packed sequence end among them, threads store one by one.
__device__ __forceinline__ bool rows_by_tma(const Params& p, const KeyTile& tile, int key) {
  return !p.thd_k || (key >= tile.k.owned_lo && key + kRowsOfWarp <= tile.k.owned_hi);
}

// The same of a warp's 16 keys by TMA, with a third of the instructions and no shuffles. Called by
// all lanes; lane 0 commits. at: rows of a Tile in shared memory, from a multiple of 16 on, that
// nobody reads any more.
template <typename Element, typename Tile, int kCount>
__device__ __forceinline__ void send_gradient(const CUtensorMap* map, const KeyTile& tile, int key,
                                              float factor, uint32_t at, float (&d)[kCount]) {
  const int lane = threadIdx.x % kWarp, row = key + lane / 4;
  keep_rows(row < tile.k.length, row + 8 < tile.k.length, d);
  stage_rows<Element, Tile>(at, 0, lane, {factor, factor}, d);
  __syncwarp();
  if (lane != 0) return;
#pragma unroll
  for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
    tma_store(map, at + chunk * Tile::kChunkBytes, chunk * kChunkColumns, tile.kv_head,
              tile.k.first + key, 0, tile.k.batch);
  }
  bulk_commit();
}

// lse2 of the queries of a thread, by pairs from shared memory.
struct PairsOfQueries {
  uint32_t address;  // of the thread's first pair

  __device__ __forceinline__ float2 of(int g) const { return load_shared_pair(address + 32 * g); }
};

// S = P of S^T: exp2(c S - lse2). lse2: of(group) of a thread's queries, asked for once a group.
template <int kTileM, typename Queries>
__device__ __forceinline__ void exponentials(float c, const Queries& lse2, float (&S)[kTileM / 2]) {
#pragma unroll
  for (int g = 0; g < kTileM / 8; ++g) {
    const float2 of_query = lse2.of(g);
    float* s = S + 4 * g;
    s[0] = exp2_approx(fmaf(s[0], c, -of_query.x)), s[1] = exp2_approx(fmaf(s[1], c, -of_query.y));
    s[2] = exp2_approx(fmaf(s[2], c, -of_query.x)), s[3] = exp2_approx(fmaf(s[3], c, -of_query.y));
  }
}

// P = 0 where the band hides the key from the query. It has no branches: the compiler keeps
// descriptors in uniform registers only where it knows that no thread has gone another way.
template <int kTileM>
__device__ __forceinline__ void mask_band(const KeyTile& tile, int key, int block,
                                          float (&S)[kTileM / 2]) {
  const int query = block * kTileM + 2 * (threadIdx.x % 4);  // of element 0
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const Interval queries = tile.queries_of_key(key + 8 * r);
    const uint32_t visible = element_bits(queries.lo - query, queries.hi - query);
#pragma unroll
    for (int e = 0; e < kTileM / 4; ++e) {
      float& s = S[4 * (e / 2) + 2 * r + e % 2];
      s = visible >> e & 1 ? s : 0.f;
    }
  }
}

}  // namespace tessera::cuda::sm90
