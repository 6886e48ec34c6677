// SPDX-License-Identifier: Apache-2.0
// Which keys a CTA of the backward pass owns, and which blocks of queries see them.
#pragma once

#include "cuda/common/sequence.cuh"
#include "cuda/sm90/backward/params.h"

namespace tessera::cuda::sm90 {

struct KeyTile {
  int n, kv_head;
  int key0;  // the tile's first row; the sequence's rows are below
  Rows q, k;
  Band band;
  // Blocks of queries [begin, end) that see some key of the tile. Every row that exists in blocks
  // [clean_begin, clean_end) sees all of them.
  int begin, end, clean_begin, clean_end;
  int first_slot;       // of block 0
  int member, members;  // of the query heads that share the keys: the first of this CTA, how many
  // The part of a tile that several CTAs share (backward/fused/share.cuh); parts == 1: this one
  // alone.
  int part;  // of all parts of the head's tiles
  int rank, parts;
  int place;     // of this part's sums
  int upwards;   // deterministic: see backward/fused/turns.cuh
  int descends;  // else: walks from the last block to the first

  // Queries that see a key of a tile that some query sees; neither end falls from key to key.
  __device__ __forceinline__ Interval queries_of_key(int key) const {
    return {band.first(key), key < band.len_k ? band.end(key) : 0};
  }
  __device__ __forceinline__ bool owns(int key) const {
    return key >= k.owned_lo && key < k.owned_hi;
  }
};

// tile_of_slot() of packed keys for a thread by itself, whose CTA waits for it: memory is asked once for
// each factor of 8 in the number of sequences, not of 2. Of starts in 64 bits the low half is read, which
// is all of those that a caller may give.
__device__ __forceinline__ TileOfRows tile_of_packed_slot(const Params& p, int slot,
                                                          int tile_rows) {
  constexpr int kWays = 8;
  const View& padded = p.tensor[SideOfKeys::kPadded];
  const View& starts = padded.data ? padded : p.tensor[SideOfKeys::kCuSeqlens];
  const auto* const words = static_cast<const int32_t*>(starts.data);
  const int64_t step_words = starts.stride[0] * (starts.dtype == TESSERA_INT32 ? 1 : 2);
  int lo = 0, hi = p.batch;  // the first slot of lo <= slot < that of hi
  while (hi - lo > 1) {
    const int step = (hi - lo + kWays - 1) / kWays;
    int begun = 0;
#pragma unroll
    for (int i = 1; i < kWays; ++i) {
      const int n = lo + i * step;
      const int start = clamped(__ldg(words + min(n, p.batch - 1) * step_words), 0, p.sk);
      begun += n < hi && start / tile_rows + n + 1 <= slot;
    }
    lo += begun * step;
    hi = min(lo + step, hi);
  }
  const int start = packed_start<SideOfKeys>(p, lo), next = packed_start<SideOfKeys>(p, lo + 1);
  const int end =
      lo + 1 < p.batch ? next / tile_rows + lo + 2 : num_tile_slots(true, p.sk, p.batch, tile_rows);
  const int tiles_before = lo == 0 ? (start + tile_rows - 1) / tile_rows : 0;
  return {lo, (end - 1 - slot - tiles_before) * tile_rows};
}

template <int kTileM, int kTileN>
struct KeySchedule {
  static constexpr int kKeys = kTileN;

  // The tile that stands at `index` of the grid. Causal problems have the longest tiles first,
  // which are those of the first keys; the heads of a section stand side by side.
  // turn: sequences further on. kOrdered: reads a.key_tiles, if there are any, for which the kernel
  // before has to be done.
  template <bool kOrdered = false>
  static __device__ __forceinline__ KeyTile decode(const BackwardParams& a, int index,
                                                   int turn = 0) {
    const Params& p = a.problem;
    KeyTile tile;
    tile.member = tile.rank = 0;
    tile.members = p.group;
    tile.parts = 1;
    int n;
    tile.upwards = tile.descends = 0;
    if (p.thd_k) {
      const int section = a.per_section.quotient(index);
      const int in_section = index - section * a.per_section.divisor;
      const int slot = a.heads_per_section.quotient(in_section);
      tile.upwards = a.upward_sections > 0;
      tile.descends = a.alternates;
      tile.kv_head =
          section * a.heads_per_section.divisor + in_section - slot * a.heads_per_section.divisor;
      if (kOrdered && a.ordered_slots > 0) {
        const int2 at = a.key_tiles[slot];
        n = at.x;
        tile.key0 = at.y;
      } else {
        const TileOfRows rows =
            tile_of_packed_slot(p, tile.upwards ? slot : a.tiles / p.hk - 1 - slot, kTileN);
        n = rows.n;
        tile.key0 = rows.begin;
      }
    } else {
      n = place(a, index, tile) + turn;
    }
    // Nothing is to be loaded before the tile is known if all sequences fill their tensors.
    const bool fills = !p.thd_q && !p.thd_k && !p.tensor[TESSERA_SEQLENS_Q].data &&
                       !p.tensor[TESSERA_SEQLENS_K].data;
    if (fills) {
      set_sequence(p, n, {n, 0, p.sq, 0, p.sq}, {n, 0, p.sk, 0, p.sk}, tile);
    } else {
      set_sequence(p, n, rows_of<SideOfQueries>(p, n), rows_of<SideOfKeys>(p, n), tile);
    }
    set_blocks(p, tile);
    return tile;
  }
  static __device__ __forceinline__ void set_sequence(const Params& p, int n, const Rows& q,
                                                      const Rows& k, KeyTile& tile) {
    tile.n = n;
    tile.q = q;
    tile.k = k;
    tile.first_slot = first_slot_of(p.thd_q, n, q.first, kTileM, (p.sq + kTileM - 1) / kTileM);
  }
  // Called after set_sequence(), once: lengths that come by two ways would take two registers each.
  static __device__ __forceinline__ void set_blocks(const Params& p, KeyTile& tile) {
    tile.band = band_of(p, tile.n, tile.q.length, tile.k.length);
    const int end = tile.key0 + kTileN;
    const Interval some = tile.band.rows(tile.key0, end),
                   all = tile.band.rows_of_all(tile.key0, end);
    const bool seen = !some.empty();
    tile.begin = seen ? some.lo / kTileM : 0;
    tile.end = seen ? (some.hi + kTileM - 1) / kTileM : 0;
    tile.clean_begin = (all.lo + kTileM - 1) / kTileM;
    tile.clean_end = all.hi >= tile.q.length ? tile.end : max(all.hi, 0) / kTileM;
  }

 private:
  // Sets, on a padded side, the tile's head, its keys and how it is walked, and finds the sequence.
  static __device__ __forceinline__ int place(const BackwardParams& a, int index, KeyTile& tile) {
    int x, round;  // head of the batch, tile of the head
    if (a.longest_first) {
      const int section = a.per_section.quotient(min(index, a.first_of_last));
      const Divisor& heads = index < a.first_of_last ? a.heads_per_section : a.heads_of_last;
      const int r = index - section * a.per_section.divisor;
      round = heads.quotient(r);
      x = section * a.heads_per_section.divisor + r - round * heads.divisor;
      tile.upwards = section < a.upward_sections;
      tile.descends = a.alternates && section % 2 == 0;
      if (tile.upwards) round = a.tiles_n.divisor - 1 - round;
    } else {
      x = a.tiles_n.quotient(index);
      round = index - x * a.tiles_n.divisor;
    }
    tile.part = round;
    if (a.parts > 0) {
      const int at = place_of_part(a, tile.part);
      tile.rank = tile.part - a.first_part[at];
      tile.parts = a.first_part[at + 1] - a.first_part[at];
      round = a.tile_at[at];
      tile.place = x * a.stored_parts + tile.part;
    }
    const int n = a.heads.quotient(x);
    tile.key0 = round * kTileN;
    tile.kv_head = x - n * a.heads.divisor;
    return n;
  }
  static __device__ __forceinline__ int place_of_part(const BackwardParams& a, int part) {
    int lo = 0, hi = a.tiles_n.divisor;  // first_part[lo] <= part < first_part[hi]
    while (hi - lo > 1) {
      const int middle = (lo + hi) / 2;
      (a.first_part[middle] <= part ? lo : hi) = middle;
    }
    return lo;
  }
};

// Leaves of a tile what its part `rank` does: heads first, blocks where heads do not suffice.
__device__ __forceinline__ void take_part(KeyTile& tile) {
  int by_heads = tile.parts;
  while (tile.parts % by_heads != 0 || tile.members % by_heads != 0) --by_heads;
  const int by_blocks = tile.parts / by_heads, blocks = max(tile.end - tile.begin, 0);
  const int of_heads = tile.rank / by_blocks, of_blocks = tile.rank % by_blocks;
  tile.members /= by_heads;
  tile.member = of_heads * tile.members;
  tile.end = tile.begin + blocks * (of_blocks + 1) / by_blocks;
  tile.begin += blocks * of_blocks / by_blocks;
}

// Which loop is the inner one, over the blocks of a walk or over the query heads of a group;
// kEither: as BackwardParams::heads_inner says.
enum class InnerLoop { kBlocks, kHeads, kEither };

// body(member of the group, block) for the blocks of a walk, from `begin` to before `end` in
// number, and every query head.
template <InnerLoop kInner, typename Body>
__device__ __forceinline__ void for_each_block(const BackwardParams& a, int group, int begin,
                                               int end, int first, int step, const Body& body) {
  if constexpr (kInner == InnerLoop::kEither) {
    const bool heads = a.heads_inner;
    const int blocks = end - begin;
    // Steps in the inner loop, and from the end of one to the start of the next.
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
