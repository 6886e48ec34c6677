// SPDX-License-Identifier: Apache-2.0
// dK and dV, the other half of the backward pass: transposed, so that P and dS stay in registers.
//
//     S^T = K Q^T     dP^T = V dO^T     P = e^(x(S) - lse)     dS = P (dP - delta)
//     dV = P^T dO     dK = dS^T Q scale
//
// A CTA owns a tile of keys of one key head: k and v stay in shared memory, q and do of every head
// of the group stream past, so that the sum over the group needs no second kernel. With pages it
// owns rows of one page and walks every place of every sequence that uses the page.
//
//     copies    Q(j+1) .......................... dO(j+1) .......
//     warps     wait | S^T(j), dP^T(j) | dS | dV += P^T dO | meet | dK += dS^T Q | wait ...
//
// A CTA makes both if their accumulators fit (makes_both), otherwise one piece of one of them.
// With kFused it also adds dS K to sums of dQ (backward/fused_dq.cuh).
#pragma once

#include "cuda/common/score/blocks.cuh"
#include "cuda/sm80/backward/fused_dq.cuh"
#include "cuda/sm80/backward/gradient.cuh"
#include "cuda/sm80/kernels.h"

namespace tessera::cuda::sm80 {

template <typename T, int kD, int kWarps, int kTileM, bool kFused>
struct DkdvStorage {
  static constexpr int kTileN = 16 * kWarps;
  static constexpr int kBuffers = sizeof(T) == 4 && kD > 256 ? 1 : 2;  // 163 KB of an sm80
  T k[kTileN * kSmemStride<T, kD>];
  T v[kTileN * kSmemStride<T, kD>];
  T q[kBuffers][kTileM * kSmemStride<T, kD>];
  T grad_o[kTileM * kSmemStride<T, kD>];
  float lse[kBuffers][kTileM];
  float delta[kBuffers][kTileM];
  alignas(16) T ds[kFused ? kTileN * kSmemStride<T, kTileM> : 1];  // dS^T, for dQ
  DqTurns turns;                                                   // read if kFused, in turn
};

// A place where the tile's rows stand in a sequence.
struct Use {
  int n;     // sequence
  int key0;  // position of the tile's first row
};

// Finds the next entry of the table, from `cursor` on, that holds the page, and moves the cursor
// behind it; false if there is none. Called by all threads of a warp together.
__device__ inline bool next_use(const Params& p, int pool, int page, int64_t& cursor, Use& use) {
  const View& table = p.tensor[pool == TESSERA_K ? TESSERA_PAGE_TABLE_K : TESSERA_PAGE_TABLE_V];
  const int* pages = static_cast<const int*>(table.data);
  const int64_t entries = int64_t{p.batch} * p.max_pages;
  for (; cursor < entries; cursor += 32) {
    const int64_t at = cursor + threadIdx.x % 32;
    const int n = static_cast<int>(at / p.max_pages), i = static_cast<int>(at % p.max_pages);
    const bool here = at < entries && i * int64_t{p.page_size} < length_of<SideOfKeys>(p, n) &&
                      pages[offset_of(table, n, i)] == page;
    const unsigned found = __ballot_sync(~0u, here);
    if (found == 0) continue;
    cursor += __ffs(found) - 1;
    use = {static_cast<int>(cursor / p.max_pages),
           static_cast<int>(cursor % p.max_pages) * p.page_size};
    ++cursor;
    return true;
  }
  return false;
}

template <typename T, int kD, int kOut, int kWarps, int kTileM, bool kRich, bool kFused,
          bool kInTurn = false>
__global__ void __launch_bounds__(32 * kWarps)
    backward_dkdv_kernel(const __grid_constant__ DkdvArgs args) {
  using Storage = DkdvStorage<T, kD, kWarps, kTileM, kFused>;
  constexpr int kThreads = 32 * kWarps, kTileN = Storage::kTileN;
  constexpr bool kBoth = kFused || makes_both(kD), kSkip = kRich && kSkipsBlocks<kD>;
  extern __shared__ __align__(16) char shared[];
  Storage& smem = *reinterpret_cast<Storage*>(shared);
  const Params& p = args.b.params;
  const bool paged = p.page_size != 0;

  // ---- which keys, and what of them ----
  const Place place = key_place<kInTurn>(args);
  const int kv_head = place.head, piece = blockIdx.z;
  const bool makes_dk = kBoth || piece < args.pieces_k, makes_dv = kBoth || !makes_dk;
  const int first = kBoth ? 0 : (makes_dk ? piece : piece - args.pieces_k) * kOut;
  const int page = paged ? place.slot / args.tiles_a_page : 0;
  const int page_row = paged ? place.slot % args.tiles_a_page * kTileN : 0;
  int64_t cursor = 0;
  Use use{};
  bool used = true;
  if (paged) {
    used = next_use(p, args.pool, page, cursor, use);
    use.key0 += page_row;
  } else {
    const TileOfRows tile = tile_of_slot<SideOfKeys>(p, place.slot, kTileN);
    use = {tile.n, tile.begin};
    if (tile.begin >= rows_of<SideOfKeys>(p, tile.n).owned_hi) return;
  }

  const int warp_row = threadIdx.x / 32 * 16;
  __shared__ QueryBlocks blocks;
  float dk[kOut / 2];  // or, unless kBoth, whichever this CTA makes
  float dv[kBoth ? kOut / 2 : 1];
#pragma unroll
  for (float& x : dk) x = 0;
#pragma unroll
  for (float& x : dv) x = 0;
  __shared__ int keys;  // of the tile, that some sequence has; not worth a register
  if (threadIdx.x == 0) keys = 0;

  while (used) {
    const Sequence sequence = sequence_of(p, use.n);
    const int key0 = use.key0;
    const Interval queries = sequence.band.rows(key0, key0 + kTileN);
    // A page that the sequence sees nothing of may be named by chance.
    if (threadIdx.x == 0 && !queries.empty()) keys = max(keys, sequence.k.length - key0);
    const int query_begin = queries.lo / kTileM * kTileM;
    const int steps = queries.empty() ? 0 : (queries.hi - query_begin + kTileM - 1) / kTileM;
    const int total = steps * p.group;
    const auto head_of = [&](int step) { return kv_head * p.group + step / steps; };
    const auto query_of = [&](int step) { return query_begin + step % steps * kTileM; };
    const auto load_q = [&](int step, int buffer) {
      const int head = head_of(step), query0 = query_of(step);
      load_queries<T, kTileM, kD, kThreads, kRich>(smem.q[buffer], p, TESSERA_Q, sequence, head,
                                                   query0, p.dqk);
      const int64_t at = statistics_at(p, sequence, head) + query0;
      for (int i = threadIdx.x; i < kTileM; i += kThreads) {
        const bool exists = query0 + i < sequence.q.length;
        copy_async<4>(&smem.lse[buffer][i], args.b.lse + at + (exists ? i : 0), exists ? 4 : 0);
        copy_async<4>(&smem.delta[buffer][i], args.b.delta + at + (exists ? i : 0), exists ? 4 : 0);
      }
      commit_copies();
    };
    const auto load_grad_o = [&](int step) {
      load_queries<T, kTileM, kD, kThreads, kRich>(smem.grad_o, p, TESSERA_DO, sequence,
                                                   head_of(step), query_of(step), p.dv);
      commit_copies();
    };

    if constexpr (kRich) {
      if (threadIdx.x < 32) blocks = QueryBlocks::of(args.blocks, p, sequence, key0, kTileN);
      __syncthreads();
    }
    const auto view_of = [&](int step) { return blocks(head_of(step), query_of(step) / kTileM); };
    BlockWalk<kRich> walk(total);
    int next = walk.next(view_of);
    if (next < total) {
      const int head0 = kv_head * p.group;
      const KeyRows k_rows = key_rows(p, TESSERA_K, sequence, head0, p.group);
      const KeyRows v_rows = key_rows(p, TESSERA_V, sequence, head0, p.group);
      load_keys<T, kTileN, kD, kThreads, kRich>(smem.k, k_rows, key0, p.dqk, p.tensor[TESSERA_K]);
      load_keys<T, kTileN, kD, kThreads, kRich>(smem.v, v_rows, key0, p.dv, p.tensor[TESSERA_V]);
      load_q(next, 0);
      load_grad_o(next);
      if (kInTurn && threadIdx.x == 0) {
        smem.turns = DqTurns(sequence.band, key0, args.order && !args.order->overlap);
      }
      if constexpr (kSplits<T>) {
        wait_for_copies<0>();
        __syncthreads();
        split_tile<T, kTileN, kD, kWarps>(smem.k, threadIdx.x / 32);
        split_tile<T, kTileN, kD, kWarps>(smem.v, threadIdx.x / 32);
      }
    }
    int buffer = 0;
    while (next < total) {
      const int step = next;
      const bool shown = walk.full(step);
      next = walk.next(view_of);
      const bool more = next < total;
      const int head = head_of(step), query0 = query_of(step);
      wait_for_copies<0>();
      // Q(j) and dO(j) are there, and Q(j - 1) has been used
      meet_and_split<T, kD, kWarps, kTileM, kTileM>(smem.q[buffer], smem.grad_o);
      if (Storage::kBuffers == 2 && more) load_q(next, buffer ^ 1);

      // S^T = K Q^T, dP^T = V dO^T
      float s[kTileM / 2], dp[kTileM / 2];
#pragma unroll
      for (int e = 0; e < kTileM / 2; ++e) s[e] = dp[e] = 0;
      multiply_nt<T, kTileM, kD, kSkip, true, kSkip>(s, smem.k, warp_row, smem.q[buffer], p.dqk);
      if (makes_dk) {
        multiply_nt<T, kTileM, kD, kSkip, true>(dp, smem.v, warp_row, smem.grad_o, p.dv);
      }

      // P, dS
      const Interval clean = sequence.band.keys_of_all(query0, query0 + kTileM);
      const auto row = [&](int column) {
        const int i = lane_minor() + column / 2 * 8 + column % 2;
        return RowStatistics{smem.lse[buffer][i], smem.delta[buffer][i]};
      };
      float slope[2] = {};
      score_gradient<T, kTileM, Major::kKeys, kRich>(
          s, dp, p, sequence, TileRows{query0, head, 1}, key0 + warp_row, 0,
          key0 >= clean.lo && key0 + kTileN <= clean.hi, shown, row, slope);

      if constexpr (kFused) {
        store_fragment<T, kTileM, kTileM>(smem.ds + warp_row * kSmemStride<T, kTileM>, dp);
      }

      // dV += P^T dO
      if constexpr (kBoth) {
        multiply_nn<T, kOut, kTileM, kD, kSkip>(dv, s, smem.grad_o, 0, p.dv);
      } else if (makes_dv) {
        multiply_nn<T, kOut, kTileM, kD, kSkip>(dk, s, smem.grad_o, first, p.dv);
      }
      __syncthreads();  // dO's buffer is free, and dS^T is there
      if (kInTurn && threadIdx.x == 0) smem.turns.pass_on();
      if (more) load_grad_o(next);

      // dK += dS^T Q
      if (makes_dk) {
        multiply_nn<T, kOut, kTileM, kD, kSkip>(dk, dp, smem.q[buffer], first, p.dqk);
      }
      if constexpr (kFused) {
        if (!kInTurn || args.dq_sums) {
          const int slot = slot_of_block<SideOfQueries>(p, sequence.n, sequence.q.first, kTileM,
                                                        query0 / kTileM);
          add_dq<T, kD, kWarps, kTileM, kTileN, kInTurn>(args, head, slot, query0, smem.ds, smem.k,
                                                         smem.turns);
        }
      }
      if constexpr (Storage::kBuffers == 2) {
        buffer ^= 1;
      } else if (more) {
        __syncthreads();  // Q's only buffer is free
        load_q(next, 0);
      }
    }
    if (kInTurn && total > 0) {
      __syncthreads();  // all have added
      if (threadIdx.x == 0) smem.turns.pass_on();
    }
    used = paged && next_use(p, args.pool, page, cursor, use);
    use.key0 += page_row;
    if (used) __syncthreads();  // all buffers are free
  }

  // ---- epilogue ----
  const Rows owner = paged ? Rows{} : rows_of<SideOfKeys>(p, use.n);
  __syncthreads();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = warp_row + 8 * half + lane_major();
    const auto store = [&](int tensor, auto& c, float factor, int width, int pages) {
      const View& out = p.tensor[tensor];
      const int row = paged ? page_row + i : use.key0 + i;
      const bool mine =
          paged ? row < p.page_size && page < pages : row >= owner.owned_lo && row < owner.owned_hi;
      if (!out.data || !mine) return;
      if (i >= keys) clear_row(c, half);
      const int64_t at = paged ? offset_of(out, page, row, kv_head, first)
                               : offset_of(out, owner.batch, owner.first + row, kv_head, first);
      store_row<T, kOut>(out.data, at, out.dtype, out.vector_bytes, c, half, factor, width - first);
    };
    if (makes_dk && args.outputs & kDk) store(TESSERA_DK, dk, p.softmax_scale, p.dqk, p.pages_k);
    if (makes_dv && args.outputs & kDv) {
      if constexpr (kBoth) {
        store(TESSERA_DV, dv, p.dropout_scale, p.dv, p.pages_v);
      } else {
        store(TESSERA_DV, dk, p.dropout_scale, p.dv, p.pages_v);
      }
    }
  }
}

template <typename T, typename Row>
Code make_dkdv() {
  constexpr Tile kTile = Row::kTile;
  static_assert(kTile.row_tiles == 1);
  static_assert(holds<DkdvStorage<T, kTile.bucket, kTile.warps, kTile.step, false>>(kTile));
  return {reinterpret_cast<const void*>(
      &backward_dkdv_kernel<T, kTile.bucket, output_columns(kTile.bucket), kTile.warps, kTile.step,
                            Row::kFeatures == kGeneral, false>)};
}

}  // namespace tessera::cuda::sm80
