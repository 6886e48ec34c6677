// SPDX-License-Identifier: Apache-2.0
// Forward pass for few rows and many keys, in one launch: bound by the bytes of K and V, so
// everything serves to keep loads in flight, on every multiprocessor, to the end.
//
// Work is counted on the device, from live lengths (work.cuh): each CTA takes an equal run of steps
// of keys, across tiles, heads and sequences. Where a run begins or ends within a tile, its part of
// that tile goes to the workspace, and whoever is last to bring one sums them in their order.
//
// In a CTA, teams of kTeam warps take every kTeams-th block of kKeys keys each, with a softmax and
// an O of their own and a ring of kStages blocks that they alone fill and drain. The products are
// transposed, with keys and columns of V as the 16 rows of an mma and the rows of queries as its
// 8 columns, so that few rows waste little:
//
//     team t    copies  block t + (s + kStages - 1) kTeams ...
//               S^T = K Q^T | softmax | O^T += V^T P^T     on block t + s kTeams
//     at last   o = sum_t 2^(m_t - m) O_t / l
//
// A warp has the columns 8 n .. 8 n + 7 of n < kGroups groups of rows: lane l rows 2 (l % 4) and
// the next of each. An E4M3 cache is converted to fp16, which holds it exactly, between the load
// and the mma; a bf16 q then becomes fp16 times a power of two for each row.
#pragma once

#include "cuda/common/few/rows.cuh"
#include "cuda/sm80/stream/operands.cuh"

namespace tessera::cuda::sm80 {

template <typename S>
__global__ void __launch_bounds__(S::kThreads)
    stream_kernel(const __grid_constant__ PartsArgs args) {
  using T = typename S::Query;
  extern __shared__ __align__(16) char shared[];
  auto& smem = *reinterpret_cast<typename S::Storage*>(shared);
  const Params& p = args.params;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int team = warp / S::kTeam, thread = threadIdx.x % (32 * S::kTeam);
  const int first_row = warp % S::kTeam * 8 * S::kGroups;
  const Found found = find_start(args, S::kStepKeys, blockIdx.x, gridDim.x);
  for (Walk walk = found.walk(args, S::kStepKeys, blockIdx.x); walk.next();) {
    const Piece piece = walk.piece();
    const Sequence& sequence = walk.sequence();
    const int head0 = piece.pack * args.pack, queries = args.queries.divisor;
    if (threadIdx.x == 0) open_count(args, piece);
    const int kv_head = args.packs_kv.quotient(piece.pack);
    const TileRows rows{piece.row0, head0, args.pack};
    const FewRows tile{p, sequence, rows, queries * args.pack};

    // ---- copies: q with the first block of keys, then a ring of blocks for each team ----
    KeyCopies<S> copies(args, sequence, kv_head, thread);
    const Interval visible = sequence.band.keys(piece.row0, piece.row0 + queries);
    const Interval clean = sequence.band.keys_of_all(piece.row0, piece.row0 + queries);
    // Every team takes as many steps, so that all come to the same barriers.
    const int keys = min(piece.key_end, visible.hi) - piece.key_begin;
    const int steps = max((keys + S::kStepKeys - 1) / S::kStepKeys, 1);
    const int key_begin = piece.key_begin + team * S::kKeys;
    copies.fetch(key_begin);
    load_q<T, S>(smem, query_rows(p, TESSERA_Q, sequence, head0, piece.row0, args.pack, tile.used),
                 p.tensor[TESSERA_Q], p.dqk);

    const float to_log2 = logit_scale<T>(p) * k_scale_of(p, sequence.n, kv_head);

    // ---- the keys: as block `step` is copied, the one kAhead before it is added ----
    constexpr int kAhead = S::kStages - 1;
    TransposedRows<S> result;
    result.set_queries(smem_address(smem.q + first_row * S::kQStride));
    float scale[S::kGroups][2];
    int stage = 0, key0 = key_begin - kAhead * S::kStepKeys;
#pragma unroll 1
    for (int step = -kAhead; step < steps; ++step, key0 += S::kStepKeys) {
      const int next = stage + 1 == S::kStages ? 0 : stage + 1;
      if (step >= 0) {
        wait_for_copies<S::kStages - 2>();
        // The block is there, at first with q, and the stage to be filled has been used.
        if (step == 0) {
          __syncthreads();
#pragma unroll
          for (int n = 0; n < S::kGroups; ++n) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              scale[n][e] = to_log2;
              if constexpr (S::kFp8) {
                scale[n][e] *= smem.q_scale[first_row + 8 * n + lane % 4 * 2 + e];
              }
            }
          }
        } else if constexpr (S::kTeam == 1) {
          __syncwarp();
        } else {
          asm volatile("bar.sync %0, %1;" ::"r"(1 + team), "n"(32 * S::kTeam) : "memory");
        }
      }
      if (step + kAhead < steps) {
        const int ahead = key0 + kAhead * S::kStepKeys;
        copies.copy(smem.ring[team][stage], ahead);
        copies.fetch(ahead + S::kStepKeys);
      }
      commit_copies();  // empty at the end, so that counting stays simple
      if (step >= 0) {
        const bool all_see = key0 >= clean.lo && key0 + S::kKeys <= clean.hi;
        const auto& block = smem.ring[team][next];
        result.add(smem_address(block.k), smem_address(block.v), scale, key0, all_see, visible,
                   [&](int n, int e) {
                     return sequence.band.row(rows.query(first_row + 8 * n + lane % 4 * 2 + e));
                   });
      }
      stage = next;
    }

    // ---- the teams' parts, then the rows ----
    wait_for_copies<0>();
    __syncthreads();  // the rings are free
    result.add_lanes();
#pragma unroll
    for (int n = 0; n < S::kGroups; ++n) result.store(smem.parts, team, first_row + 8 * n, n);
    __syncthreads();
    constexpr int kQuads = S::kD / 4;
    bool finishes = true;
    if (piece.parts > 1) {
#pragma unroll 1
      for (int i = threadIdx.x; i < tile.used * kQuads; i += S::kThreads) {
        const int row = i / kQuads, column = i % kQuads * 4;
        const RowSum total = sum_of_teams(smem.parts, row, column);
        const int64_t at = int64_t{piece.slot_of(piece.part)} * S::kRows + row;
        __stcg(reinterpret_cast<float4*>(args.part_o + at * S::kD + column), total.o);
        if (column == 0) __stcg(args.part_sums + at, make_float2(total.max, total.sum));
      }
      __syncthreads();  // the CTA has written its part
      if (threadIdx.x == 0) smem.last = brings_last(args, piece);
      __syncthreads();
      finishes = smem.last;
    }
    const int quads = finishes ? tile.used * kQuads : 0;
#pragma unroll 1
    for (int i = threadIdx.x; i - lane < quads; i += S::kThreads) {  // by whole warps
      const int row = min(i / kQuads, tile.used - 1), column = i % kQuads * 4;
      const RowSum total = piece.parts == 1 ? sum_of_teams(smem.parts, row, column)
                                            : sum_of_parts<S>(args, piece, row, column);
      if (i < quads) tile.template finish<T>(row, column, total);
    }
    __syncthreads();  // the parts are free
  }
}

template <typename T, typename Row>
StreamCode make_stream() {
  constexpr StreamTile kTile = Row::kTile;
  using S = Stream<T, kTile.bucket, kTile.rows, kTile.warps, kTile.team, kTile.keys, kTile.stages,
                   kTile.cache == Cache::e4m3>;
  static_assert(S::kStepKeys == kTile.step_keys());
  constexpr int kBytes = sizeof(typename S::Storage);
  static_assert(kBytes <= kTile.shared_bytes && kTile.shared_bytes - kBytes < 1024);
  return {reinterpret_cast<const void*>(&stream_kernel<S>)};
}

}  // namespace tessera::cuda::sm80
