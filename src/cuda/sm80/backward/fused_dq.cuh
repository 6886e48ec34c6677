// SPDX-License-Identifier: Apache-2.0
// dQ inside the pass over keys: five products instead of seven.
//
//     dQ[tile of queries] += dS K      by atomic additions to fp32 sums, then dq = scale sums
//
// The warps cut the dQ of a step into pieces of 32 rows. A piece of the sums lies in memory as its
// fragments lie in registers, so that a warp adds to neighbouring addresses.
//
// Deterministic sums are added to in turn: the tiles of keys that see a tile of queries add from
// the last to the first. They follow one another without gaps, so each computes its turn, and a
// counter beside the sums says whose turn it is. CTAs take tiles by ticket, the last keys first: a
// tile waits for earlier tickets alone, which run, whatever the order of the hardware is, and end.
// All walk from the first queries to the last: under a causal mask, tiles that begin together stand
// behind one another. Tickets go round the heads of a section, so that fewer tiles of a head wait
// for each other; sections are small enough for L2.
#pragma once

#include "cuda/common/score/blocks.cuh"
#include "cuda/sm80/backward/gradient.cuh"
#include "cuda/sm80/machine/place.cuh"

namespace tessera::cuda::sm80 {

// The piece of a warp: 32 rows by kColumns columns.
template <int kD, int kWarps, int kTileM>
struct DqPiece {
  static constexpr int kGroups = kTileM / 32, kColumns = kD * kGroups / kWarps;
  static constexpr int kFloats = kTileM * kD;  // of a tile
  static_assert(kTileM % 32 == 0 && kWarps % kGroups == 0 && kColumns % 16 == 0);

  __device__ static int row(int warp) { return warp % kGroups * 32; }
  __device__ static int column(int warp) { return warp / kGroups * kColumns; }
  // Where the four floats e .. e + 3 of row tile r are in a tile of sums.
  __device__ static int at(int warp, int r, int e) {
    return ((warp * 2 + r) * kColumns / 2 + e) * 32 + threadIdx.x % 32 * 4;
  }
};

__device__ inline void add_to_memory(float* to, const float* four) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(four[0]),
               "f"(four[1]), "f"(four[2]), "f"(four[3])
               : "memory");
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    asm volatile("red.global.add.f32 [%0], %1;" ::"l"(to + i), "f"(four[i]) : "memory");
  }
#endif
}

__device__ inline int load_relaxed(const int* from) {
  int value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
__device__ inline int load_acquire(const int* from) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
__device__ inline void store_release(int* to, int value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

// The tile of keys of a CTA; called by all its threads, once. In turn tickets begin with the last
// one; in any order the first ones come first, whose walks are the longest under a causal mask.
template <bool kInTurn>
__device__ __forceinline__ Place key_place(const DkdvArgs& args) {
  const int slots = gridDim.x, heads = gridDim.y;
  int index = blockIdx.y * slots + blockIdx.x;
  const bool by_ticket = kInTurn && args.order;
  if (by_ticket) {
    __shared__ int ticket;
    if (threadIdx.x == 0) ticket = atomicAdd(&args.order->ticket, 1);
    __syncthreads();
    index = ticket;
  }
  const Place place = place_of(index, slots, heads, args.section);
  return {by_ticket ? place.slot : slots - 1 - place.slot, place.head};
}

// The turns of one tile of keys. Lives in shared memory.
class DqTurns {
 public:
  DqTurns() = default;
  __device__ DqTurns(const Band& band, int key0, bool waits)
      : band_(band), key0_(key0), waits_(waits) {}

  // The number of tiles of kTileN keys that add to the kTileM queries from query0 on before this.
  template <int kTileM, int kTileN>
  __device__ int turn_of(int query0) const {
    return (band_.keys(query0, query0 + kTileM).hi - 1) / kTileN - key0_ / kTileN;
  }

  // Waits until it is that turn. seen: what the counter was before. If that look was enough,
  // nothing is to be acquired: what follows are additions, made where the counter lies and after it
  // was read.
  __device__ __forceinline__ void wait(const int* counter, int seen, int turn) const {
    if (seen == turn || !waits_) return;
    while (load_acquire(counter) != turn) {
    }
  }

  // Remembers whose turn ends when the additions that follow are done. Called by thread 0.
  __device__ void adding(int* turn, int next) {
    told_ = turn;
    next_ = next;
  }
  // Ends that turn. Called by thread 0, after a barrier of all who have added.
  __device__ void pass_on() {
    if (told_) store_release(told_, next_);
    told_ = nullptr;
  }

 private:
  Band band_;
  int key0_;
  bool waits_;
  int* told_ = nullptr;
  int next_ = 0;
};

// Adds dS K to the sums of a tile of queries. Called by all warps. ds: [kTileN][kTileM]; k:
// [kTileN][kD]; turns: read if kInTurn.
template <typename T, int kD, int kWarps, int kTileM, int kTileN, bool kInTurn>
__device__ __forceinline__ void add_dq(const DkdvArgs& args, int head, int slot, int query0,
                                       const T* ds, const T* k, DqTurns& turns) {
  using Piece = DqPiece<kD, kWarps, kTileM>;
  constexpr int kStep = Mma<T>::kK;
  const int64_t tile = int64_t{head} * args.dq_slots + slot;
  const int warp = threadIdx.x / 32, row = Piece::row(warp), column = Piece::column(warp);
  int* const whose = args.turns + tile;
  const int seen = kInTurn ? load_relaxed(whose) : 0;  // long before it is needed
  float dq[2][Piece::kColumns / 2] = {};
#pragma unroll
  for (int key = 0; key < kTileN; key += kStep) {
    const float factor = Mma<T>::scale_of(ds, kSmemStride<T, kTileM>, key) *
                         Mma<T>::scale_of(k, kSmemStride<T, kD>, key);
    typename Mma<T>::A a[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      a[r] = Mma<T>::load_a_transposed(ds, kSmemStride<T, kTileM>, key, row + 16 * r);
    }
#pragma unroll
    for (int c = 0; c < Piece::kColumns; c += 16) {
      const auto b = Mma<T>::load_b_transposed(k, kSmemStride<T, kD>, key, column + c);
#pragma unroll
      for (int r = 0; r < 2; ++r) Mma<T>::multiply(dq[r] + c / 2, a[r], b, factor);
    }
  }
  float* sums = args.dq_sums + tile * Piece::kFloats;
  if constexpr (kInTurn) {
    const int turn = turns.turn_of<kTileM, kTileN>(query0);
    if (threadIdx.x == 0) turns.adding(whose, turn + 1);
    if (turn == 0) {  // stores, so that sums need no zeros
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int e = 0; e < Piece::kColumns / 2; e += 4) {
          *reinterpret_cast<float4*>(sums + Piece::at(warp, r, e)) = {dq[r][e], dq[r][e + 1],
                                                                      dq[r][e + 2], dq[r][e + 3]};
        }
      }
      return;
    }
    turns.wait(whose, seen, turn);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int e = 0; e < Piece::kColumns / 2; e += 4)
      add_to_memory(sums + Piece::at(warp, r, e), dq[r] + e);
  }
}

// Writes dq from its sums, and zeros to stored rows outside the sequences. grid: (tiles of queries,
// heads).
template <typename T, int kD, int kWarps, int kTileM>
__global__ void __launch_bounds__(32 * kWarps)
    finish_dq_kernel(const __grid_constant__ DkdvArgs args) {
  using Piece = DqPiece<kD, kWarps, kTileM>;
  const Params& p = args.b.params;
  const TileOfRows tile = tile_of_slot<SideOfQueries>(p, blockIdx.x, kTileM);
  const Rows rows = rows_of<SideOfQueries>(p, tile.n);
  if (tile.begin >= rows.owned_hi) return;
  const int head = blockIdx.y, warp = threadIdx.x / 32;
  const int slot = slot_of_block<SideOfQueries>(p, tile.n, rows.first, kTileM, tile.begin / kTileM);
  const int64_t index = int64_t{head} * args.dq_slots + slot;
  const bool summed =
      tile.begin >= 0 && tile.begin < rows.length && (!args.order || args.turns[index] > 0);
  const float* sums = args.dq_sums + index * Piece::kFloats;
  const View& out = p.tensor[TESSERA_DQ];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float dq[Piece::kColumns / 2];
#pragma unroll
    for (int e = 0; e < Piece::kColumns / 2; e += 4) {
      const float4 four = summed ? *reinterpret_cast<const float4*>(sums + Piece::at(warp, r, e))
                                 : float4{0, 0, 0, 0};
      dq[e] = four.x, dq[e + 1] = four.y, dq[e + 2] = four.z, dq[e + 3] = four.w;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = tile.begin + Piece::row(warp) + 16 * r + 8 * half + lane_major();
      if (query < rows.owned_lo || query >= rows.owned_hi) continue;
      if (query >= rows.length) clear_row(dq, half);
      const int column = Piece::column(warp);
      const int64_t at = offset_of(out, rows.batch, rows.first + query, head, column);
      store_row<T, Piece::kColumns>(out.data, at, out.dtype, out.vector_bytes, dq, half,
                                    p.softmax_scale, p.dqk - column);
    }
  }
}

}  // namespace tessera::cuda::sm80
