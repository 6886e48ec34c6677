// SPDX-License-Identifier: Apache-2.0
// What a thread holds of an accumulator: of each of two rows the elements e = 0, 1, ..., which
// stand at columns 8 (e / 2) + e % 2 from its first one; the four threads of a quad share the rows.
#pragma once

#include "cuda/common/element.cuh"
#include "cuda/common/score/score.cuh"
#include "cuda/sm90/machine/ptx.cuh"

namespace tessera::cuda::sm90 {

// How many elements of a row stand before `column`, counted from the thread's first one.
__device__ __forceinline__ int elements_before(int column) {
  const unsigned columns = max(column, 0);
  return (columns / 4 & ~1u) + min(columns % 8, 2u);
}
__device__ __forceinline__ uint32_t low_bits(int n) {
  uint32_t bits;
  asm("bmsk.clamp.b32 %0, 0, %1;" : "=r"(bits) : "r"(max(n, 0)));
  return bits;
}
// Bit e - 32 word: element e stands in columns [lo, hi).
__device__ __forceinline__ uint32_t element_bits(int lo, int hi, int word = 0) {
  return low_bits(elements_before(hi) - 32 * word) & ~low_bits(elements_before(lo) - 32 * word);
}

// Bits 0, 1, 8, 9, 16, 17, 24 and 25, which are the thread's elements in 32 columns, side by side.
__device__ __forceinline__ uint32_t elements_of_columns(uint32_t columns) {
  const uint32_t pairs = columns & 0x03030303u;
  const uint32_t fours = pairs | pairs >> 6;  // bits 0-3 and 16-19
  return (fours & 0xf) | (fours >> 12 & 0xf0);
}

// Finds, for each of a thread's two rows, the elements whose columns have the id of the row. Called
// by all lanes: lane l has the ids of columns l, l + 32, ...; those from `end` on do not exist. The
// rows of a warp have few ids, mostly one: the columns of each are found by all lanes together.
template <int kWords>
__device__ __forceinline__ void find_same_ids(const int (&row_ids)[2],
                                              const int (&column_ids)[kWords], int end,
                                              uint32_t (&same)[2]) {
  const int lane = threadIdx.x % kWarp, quad = lane % 4;
  const int last = __reduce_max_sync(kAllLanes, max(row_ids[0], row_ids[1]));
  int id = __reduce_min_sync(kAllLanes, min(row_ids[0], row_ids[1]));
  same[0] = same[1] = 0;
  while (true) {
    uint32_t elements = 0;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const uint32_t word = __ballot_sync(kAllLanes, column_ids[i] == id && i * kWarp + lane < end);
      elements |= elements_of_columns(word >> (2 * quad)) << (8 * i);
    }
    same[0] = row_ids[0] == id ? elements : same[0];
    same[1] = row_ids[1] == id ? elements : same[1];
    if (id == last) return;
    id = __reduce_min_sync(
        kAllLanes, min(row_ids[0] > id ? row_ids[0] : last, row_ids[1] > id ? row_ids[1] : last));
  }
}

// True if x holds in any of the four threads that share the lane's rows. Called by all lanes of a
// warp.
__device__ __forceinline__ bool any_of_quad(bool x, int lane) {
  return (__ballot_sync(kAllLanes, x) & 0xfu << (lane & ~3)) != 0;
}

// The elements of a thread's two rows in a block that are to be seen.
template <int kTileN>
struct VisibleBits {
  static constexpr int kWords = (kTileN / 4 + 31) / 32;
  uint32_t word[2][kWords];

  VisibleBits() = default;
  // Those of a band: keys[r] of row r.
  __device__ __forceinline__ VisibleBits(const Interval (&keys)[2], int block, int lane) {
    const int column = block * kTileN + 2 * (lane % 4);  // of element 0
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        word[r][i] = element_bits(keys[r].lo - column, keys[r].hi - column, i);
      }
    }
  }
  // S = value where the others are. Row by row, so that seven bits become predicates at once.
  __device__ __forceinline__ void set_others(float value, float (&S)[kTileN / 2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int e = 0; e < kTileN / 4; ++e) {
        float& s = S[4 * (e / 2) + 2 * r + e % 2];
        s = word[r][e / 32] >> (e % 32) & 1 ? s : value;
      }
    }
  }
};

// S = -inf but for the elements whose bits are set in the words of the two rows. It adds, because
// additions have a faster pipe than selections; hidden scores that are NaN or infinite become NaN.
template <int kTileN>
__device__ __forceinline__ void hide_others(const uint32_t (&word)[2], float (&S)[kTileN / 2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int e = 0; e < kTileN / 4; ++e) {
      asm("{\n"
          ".reg .pred hidden;\n"
          "setp.eq.u32 hidden, %1, 0;\n"
          "@hidden add.f32 %0, %0, 0fff800000;\n"
          "}"
          : "+f"(S[4 * (e / 2) + 2 * r + e % 2])
          : "r"(word[r] & 1u << e));
    }
  }
}

// x[i] of thread t of the quad becomes x[t] of thread i.
__device__ __forceinline__ void transpose_quad(uint32_t (&x)[4], int thread) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool upper = thread & bit;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const uint32_t got = __shfl_xor_sync(kAllLanes, upper ? x[i] : x[i | bit], bit);
      (upper ? x[i] : x[i | bit]) = got;
    }
  }
}

// Zeros in the rows of a warp's fragment that are not kept, whatever was added up there: a factor
// of 0 would leave NaN as it is. Called by all lanes; branches away where all rows of the warp are
// kept.
template <int kElements>
__device__ __forceinline__ void keep_rows(bool first, bool second, float (&d)[kElements]) {
  if (__all_sync(kAllLanes, first && second)) return;
#pragma unroll
  for (int e = 0; e < kElements; ++e) d[e] = (e / 2 % 2 ? second : first) ? d[e] : 0.f;
}

// Stores a thread's two rows of a fragment, times `factor` and rounded. Pairs of threads trade
// columns, so that a quad stores whole sectors of 32 bytes: even threads store 4 columns of even
// groups of 8, odd threads of odd ones, from first_traded_column() on, which is where o points to.
// stores(r, column): whether those `column` columns further are to be stored.
__device__ __forceinline__ int first_traded_column(int lane) {
  return (lane % 2 ? 8 : 0) + lane % 4 / 2 * 4;
}
template <typename Element, int kElements, typename Stores>
__device__ __forceinline__ void store_traded(Element* const (&o)[2], const float (&factor)[2],
                                             int lane, const float (&O)[kElements],
                                             const Stores& stores) {
  const bool odd = lane % 2;
#pragma unroll
  for (int g = 0; g < kElements / 4; g += 2) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float* pair = O + 4 * g + 2 * r;
      const uint32_t even_group = pack<Element>(pair[0] * factor[r], pair[1] * factor[r]);
      const uint32_t odd_group = pack<Element>(pair[4] * factor[r], pair[5] * factor[r]);
      const uint32_t got = __shfl_xor_sync(kAllLanes, odd ? even_group : odd_group, 1);
      const uint2 mine = odd ? uint2{got, odd_group} : uint2{even_group, got};
      if (stores(r, 8 * g)) *reinterpret_cast<uint2*>(o[r] + 8 * g) = mine;
    }
  }
}

// The same in fp32, by threads that keep their pairs: o points to the first one of a thread.
template <int kElements, typename Stores>
__device__ __forceinline__ void store_pairs(float* const (&o)[2], const float (&factor)[2],
                                            const float (&O)[kElements], const Stores& stores) {
#pragma unroll
  for (int g = 0; g < kElements / 4; ++g) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float* pair = O + 4 * g + 2 * r;
      const float2 scaled{pair[0] * factor[r], pair[1] * factor[r]};
      if (stores(r, 8 * g)) *reinterpret_cast<float2*>(o[r] + 8 * g) = scaled;
    }
  }
}

// The 16 rows of a warp's fragment, times `factor` of its two rows and rounded, into a Tile in
// shared memory, whose rows begin with `row` there. The writes are visible to TMA.
template <typename Element, typename Tile, int kElements>
__device__ __forceinline__ void stage_rows(uint32_t tile, int row, int lane,
                                           const float (&factor)[2], const float (&d)[kElements]) {
#pragma unroll
  for (int g = 0; g < kElements / 4; g += 2) {
    uint32_t rounded[4];  // rows 0-7 and 8-15 of group g, then of the next
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* pair = d + 4 * g + 2 * i;
      rounded[i] = pack<Element>(pair[0] * factor[i % 2], pair[1] * factor[i % 2]);
    }
    stmatrix_x4(Tile::unit(tile, row + lane % 16, g + lane / 16), rounded);
  }
  async_proxy_fence();
}

}  // namespace tessera::cuda::sm90
