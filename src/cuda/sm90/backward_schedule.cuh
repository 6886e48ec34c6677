// SPDX-License-Identifier: Apache-2.0
// Which keys a CTA of the backward pass owns, and which blocks of queries see them.
#pragma once

#include "cuda/common/sequence.cuh"
#include "cuda/sm90/backward_params.h"
#include "cuda/sm90/ptx.cuh"

namespace tessera::cuda::sm90 {

struct KeyTile {
  int n, kv_head;
  int key0;  // the tile's first row; the sequence's rows are below
  Rows q, k;
  int shift, left, right;  // the band, see core/mask.h
  // Blocks of queries [begin, end) that see some key of the tile. Every row that exists in blocks
  // [clean_begin, clean_end) sees all of them.
  int begin, end, clean_begin, clean_end;
  int first_slot;  // of block 0
  int upwards;     // deterministic: see backward_turns.cuh
  int descends;    // else: walks from the last block to the first

  // Queries that see a key, as [lo, hi); lo and hi never decrease with the key.
  __device__ __forceinline__ int2 queries_of_key(int key) const {
    const bool exists = (key >= 0) & (key < k.length);
    const int lo = key - shift - right, hi = key - shift + left + 1;
    return {right < 0 ? 0 : max(lo, 0), !exists ? 0 : left < 0 ? q.length : min(hi, q.length)};
  }
  __device__ __forceinline__ bool owns(int key) const {
    return key >= k.owned_lo && key < k.owned_hi;
  }
};

template <int kTileM, int kTileN>
struct KeySchedule {
  // The tile that stands at `index` of the grid. Causal problems have the longest tiles first,
  // which are those of the first keys; the heads of a section stand side by side.
  // turn: sequences further on.
  static __device__ __forceinline__ KeyTile decode(const BackwardParams& a, int index,
                                                   int turn = 0) {
    const Params& p = a.problem;
    KeyTile tile;
    int n;
    tile.upwards = tile.descends = 0;
    if (p.thd_k) {
      const int slot = index / p.hk;
      tile.upwards = a.upward_sections > 0;
      const TileOfRows rows =
          tile_of_slot<SideOfKeys>(p, tile.upwards ? slot : a.tiles / p.hk - 1 - slot, kTileN);
      n = rows.n;
      tile.kv_head = index - slot * p.hk;
      tile.key0 = rows.begin;
    } else {
      n = place(a, index, tile) + turn;
      if (!p.thd_q && !p.tensor[TESSERA_SEQLENS_Q].data && !p.tensor[TESSERA_SEQLENS_K].data) {
        return of_equal_sequences(p, n, tile);
      }
    }
    const Sequence sequence = sequence_of(p, n);
    set_sequence(p, sequence, tile);
    return tile;
  }
  static __device__ __forceinline__ void set_sequence(const Params& p, const Sequence& sequence,
                                                      KeyTile& tile) {
    tile.n = sequence.n;
    tile.q = sequence.q;
    tile.k = sequence.k;
    tile.shift = static_cast<int>(sequence.band.shift);
    tile.left = static_cast<int>(sequence.band.left);
    tile.right = static_cast<int>(sequence.band.right);
    tile.first_slot =
        first_slot_of(p.thd_q, tile.n, tile.q.first, kTileM, (p.sq + kTileM - 1) / kTileM);
    set_blocks(tile, sequence.band);
  }

 private:
  // Of a padded side: sets the tile's head, its keys and how it is walked, and finds the sequence.
  static __device__ __forceinline__ int place(const BackwardParams& a, int index, KeyTile& tile) {
    int x, round;  // head of the batch, tile of the head
    if (a.longest_first) {
      const int section = a.per_section.quotient(index);
      const int r = index - section * a.per_section.divisor;
      round = a.heads_per_section.quotient(r);
      x = section * a.heads_per_section.divisor + r - round * a.heads_per_section.divisor;
      tile.upwards = section < a.upward_sections;
      tile.descends = a.alternates && section % 2 == 0;
      if (tile.upwards) round = a.tiles_n.divisor - 1 - round;
    } else {
      x = a.tiles_n.quotient(index);
      round = index - x * a.tiles_n.divisor;
    }
    const int n = a.heads.quotient(x);
    tile.key0 = round * kTileN;
    tile.kv_head = x - n * a.heads.divisor;
    return n;
  }
  // What decode() finds where all sequences fill their tensors, without a look at any: nothing is
  // loaded before the tile is known.
  static __device__ __forceinline__ KeyTile of_equal_sequences(const Params& p, int n,
                                                               KeyTile tile) {
    const int reach = p.sq + p.sk;
    tile.n = n;
    tile.q = {n, 0, p.sq, 0, p.sq};
    tile.k = {n, 0, p.sk, 0, p.sk};
    tile.shift = p.bottom_right ? p.sk - p.sq : 0;
    tile.left = min(p.left, reach);
    tile.right = min(p.right, reach);
    tile.first_slot = n * ((p.sq + kTileM - 1) / kTileM);
    set_blocks(tile, Band{p.sq, p.sk, tile.shift, tile.left, tile.right});
    return tile;
  }
  static __device__ __forceinline__ void set_blocks(KeyTile& tile, const Band& band) {
    const Interval queries =
        tile.key0 < 0 ? Interval{0, 0} : band.rows(tile.key0, tile.key0 + kTileN);
    const bool seen = !queries.empty();
    tile.begin = seen ? static_cast<int>(queries.lo) / kTileM : 0;
    tile.end = seen ? (static_cast<int>(queries.hi) + kTileM - 1) / kTileM : 0;
    const int last = tile.key0 + kTileN - 1;
    const int2 of_first = tile.queries_of_key(tile.key0), of_last = tile.queries_of_key(last);
    tile.clean_begin = (of_last.x + kTileM - 1) / kTileM;
    tile.clean_end = last >= tile.k.length         ? 0
                     : of_first.y >= tile.q.length ? tile.end
                                                   : max(of_first.y, 0) / kTileM;
  }
};

// Of the blocks of a walk and the query heads of a group, the inner loop; kEither: as
// BackwardParams::heads_inner says.
enum class InnerLoop { kBlocks, kHeads, kEither };

// body(member of the group, block) for the blocks of a walk, from `begin` to before `end` in
// number, and every query head.
template <InnerLoop kInner, typename Body>
__device__ __forceinline__ void for_each_block(const BackwardParams& a, int group, int begin,
                                               int end, int first, int step, const Body& body) {
  if constexpr (kInner == InnerLoop::kEither) {
    const bool heads = a.heads_inner;
    const int blocks = end - begin;
    // In the inner loop, and from the end of one to the start of the next.
    const int member_step = heads, block_step = heads ? 0 : step;
    const int next_member = heads ? -group : 1, next_block = heads ? step : -blocks * step;
    int member = 0, block = first;
#pragma unroll 1
    for (int i = heads ? blocks : group; i > 0 && blocks > 0; --i) {
#pragma unroll 1
      for (int j = heads ? group : blocks; j > 0; --j) {
        body(member, block);
        member += member_step, block += block_step;
      }
      member += next_member, block += next_block;
    }
  } else if constexpr (kInner == InnerLoop::kHeads) {
#pragma unroll 1
    for (int i = begin, block = first; i < end; ++i, block += step) {
#pragma unroll 1
      for (int member = 0; member < group; ++member) body(member, block);
    }
  } else {
#pragma unroll 1
    for (int member = 0; member < group; ++member) {
#pragma unroll 1
      for (int i = begin, block = first; i < end; ++i, block += step) body(member, block);
    }
  }
}

// The block of queries in a slot of the workspace; `begin` may lie past the sequence: nothing to
// do.
struct BlockOfSlot {
  int n, block;
};
__device__ __forceinline__ BlockOfSlot block_of_slot(const Params& p, int slot, int tile_m) {
  if (!p.thd_q) {
    const int blocks = (p.sq + tile_m - 1) / tile_m;
    return {slot / blocks, slot % blocks};
  }
  const auto first = [&](int n) {
    return first_slot_of(true, n, packed_start<SideOfQueries>(p, n), tile_m, 0);
  };
  int lo = 0, hi = p.batch;  // first(lo) <= slot < first(hi)
  while (hi - lo > 1) {
    const int middle = (lo + hi) / 2;
    (first(middle) <= slot ? lo : hi) = middle;
  }
  return {lo, slot - first(lo)};  // negative where what is stored before sequence 0 would stand
}

}  // namespace tessera::cuda::sm90
