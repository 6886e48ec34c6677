// SPDX-License-Identifier: Apache-2.0
// The whole backward pass of 16-bit elements in one kernel, for aligned rows without pages. It is
// backward/dkdv.cuh with dQ (backward/fused_dq.cuh), and its loop has no branches but those of its
// features, a set chosen when the kernel is compiled.
//
// kSharing warps have the same keys: each makes S^T and dP^T for its part of the queries and dK, dV
// for its part of the columns; P^T and dS^T go through shared memory. Reading fragments of Q, dO
// and K bounds the pass, and so two row tiles of a warp share each.
//
//     copies    Q(j+1) .................................. dO(j+1) ..........
//     warps     wait | S^T(j), dP^T(j) | P, dS | meet | dV += P^T dO | meet | dK += dS^T Q, dQ |
//     ...
//
// With two buffers dO(j+1) is copied with Q(j+1), and the second barrier ("meet") is left out.
#pragma once

#include <type_traits>

#include "cuda/sm80/backward/fused_dq.cuh"
#include "cuda/sm80/features.cuh"

namespace tessera::cuda::sm80 {

// Warps that have the same keys: the registers of a warp hold 2 x 64 columns of dK and of dV.
constexpr int lean_sharing(int bucket, int row_tiles) { return bucket * row_tiles > 256 ? 4 : 2; }

// kStages: buffers of dO.
template <typename T, int kD, int kRowTiles, int kWarps, int kTileM, int kStages,
          unsigned kFeatures>
struct LeanBackwardStorage {
  static constexpr int kSharing = lean_sharing(kD, kRowTiles);
  static constexpr int kTileN = 16 * kRowTiles * kWarps / kSharing;
  T k[kTileN * kSmemStride<T, kD>];
  T v[kTileN * kSmemStride<T, kD>];
  T q[2][kTileM * kSmemStride<T, kD>];
  T grad_o[kStages][kTileM * kSmemStride<T, kD>];
  T probability[kTileN * kSmemStride<T, kTileM>];  // P^T
  T ds[kTileN * kSmemStride<T, kTileM>];           // dS^T
  struct {
    float lse[kTileM], delta[kTileM];
  } statistics[2];
  T bias[kFeatures & kBias ? kTileM * kSmemStride<T, kTileN> : 8];  // queries by keys
  uint4 bits[2][kFeatures & kMasks ? kTileM : 1];                   // of a dense mask, by queries
  DqTurns turns;                                                    // read if kInTurn
  QueryBlocks blocks;                                               // read with kMasks
};

// Writes dk or dv by way of `staged`, a tile of kD columns that nobody reads any more. A warp has
// rows from warp_row on and kOut columns from `first` on. Called by all threads of the CTA.
template <typename T, int kD, int kOut, int kRowTiles, int kTileN, int kThreads>
__device__ __forceinline__ void write_gradient(const Params& p, int tensor, const Rows& rows,
                                               int key0, int kv_head, float factor, int width,
                                               float (&c)[kRowTiles][kOut / 2], int warp_row,
                                               int first, T* staged) {
  constexpr int kStride = kSmemStride<T, kD>;
  const View& out = p.tensor[tensor];
  const auto mine = [&](int row) { return row >= rows.owned_lo && row < rows.owned_hi; };
  const bool wide = out.vector_bytes == 16 && width % 8 == 0;
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = warp_row + 16 * r + 8 * half + lane_major(), row = key0 + i;
      if (row >= rows.length) clear_row(c[r], half);
      if (wide) {
        T* to = staged + i * kStride + first + lane_minor();
#pragma unroll
        for (int e = 2 * half; e < kOut / 2; e += 4) {
          *reinterpret_cast<uint32_t*>(to + 2 * (e - 2 * half)) =
              pack<T>(c[r][e] * factor, c[r][e + 1] * factor);
        }
      } else if (mine(row)) {
        const int64_t at = offset_of(out, rows.batch, rows.first + row, kv_head, first);
        store_row<T, kOut>(out.data, at, out.dtype, out.vector_bytes, c[r], half, factor,
                           width - first);
      }
    }
  }
  if (!wide) return;
  __syncthreads();
  using Lane = CopyLane<T, kTileN, kD, kThreads>;
  const int column = Lane::column();
  if (column >= width) return;
  int row = key0 + Lane::row();
  const T* from = staged + Lane::row() * kStride + column;
  T* to = static_cast<T*>(out.data) + offset_of(out, rows.batch, rows.first + row, kv_head, column);
#pragma unroll
  for (int i = 0; i < kTileN; i += Lane::kRowsAtOnce) {
    if (mine(row))
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from + i * kStride);
    row += Lane::kRowsAtOnce;
    to += Lane::kRowsAtOnce * out.stride[1];
  }
}

template <typename T, int kD, int kRowTiles, int kWarps, int kTileM, int kStages, bool kInTurn,
          unsigned kFeatures>
__global__ void __launch_bounds__(32 * kWarps, kWarps == 4 ? 2 : 1)
    backward_fused_lean_kernel(const __grid_constant__ DkdvArgs args) {
  using Storage = LeanBackwardStorage<T, kD, kRowTiles, kWarps, kTileM, kStages, kFeatures>;
  constexpr bool kSkips = (kFeatures & kMasks) != 0;
  constexpr bool kRaw = (kFeatures & kOfLogits) == 0;
  static_assert(!kSkips || !kInTurn);
  constexpr int kThreads = 32 * kWarps, kTileN = Storage::kTileN, kSharing = Storage::kSharing;
  constexpr int kColumns = kTileM / kSharing, kOut = kD / kSharing;  // of a warp
  static_assert(2 * kTileM <= kThreads);
  extern __shared__ __align__(16) char shared[];
  Storage& smem = *reinterpret_cast<Storage*>(shared);
  const Params& p = args.b.params;

  // ---- which keys, which queries ----
  const Place place = key_place<kInTurn>(args);
  const TileOfRows tile = tile_of_slot<SideOfKeys>(p, place.slot, kTileN);
  const Sequence sequence = sequence_of(p, tile.n);
  const int key0 = tile.begin, kv_head = place.head, head0 = kv_head * p.group;
  if (key0 >= sequence.k.owned_hi) return;
  const Interval queries = sequence.band.rows(key0, key0 + kTileN);
  const int query_begin = queries.lo / kTileM * kTileM;
  const int steps = queries.empty() ? 0 : (queries.hi - query_begin + kTileM - 1) / kTileM;
  const int query_end = query_begin + steps * kTileM;

  const int warp_row = threadIdx.x / 32 % (kWarps / kSharing) * 16 * kRowTiles;
  const int share = threadIdx.x / 32 / (kWarps / kSharing);
  const int column0 = share * kColumns, first = share * kOut;
  float dk[kRowTiles][kOut / 2], dv[kRowTiles][kOut / 2];
  clear(dk);
  clear(dv);

  const int total = steps * p.group;
  if constexpr (kSkips) {
    if (threadIdx.x < 32) smem.blocks = QueryBlocks::of(args.blocks, p, sequence, key0, kTileN);
    __syncthreads();
  }
  const auto view_of = [&](int step) {
    return smem.blocks(head0 + step / steps, query_begin / kTileM + step % steps);
  };
  BlockWalk<kSkips> walk(total);
  int next = walk.next(view_of);
  if (next < total) {
    const KeyRows k_rows = key_rows(p, TESSERA_K, sequence, head0, p.group);
    const KeyRows v_rows = key_rows(p, TESSERA_V, sequence, head0, p.group);
    const int valid = sequence.k.length - key0;
    KeyCopies<T, kTileN, kD, kThreads>(k_rows.base, k_rows.row_bytes, key0, p.dqk)
        .first(smem.k, valid);
    KeyCopies<T, kTileN, kD, kThreads>(v_rows.base, v_rows.row_bytes, key0, p.dv)
        .first(smem.v, valid);
    QueryCopies<T, kTileM, kD, kThreads> copy_q(query_rows(p, TESSERA_Q, sequence, head0, 0, 1, 0),
                                                query_begin, steps, p.dqk);
    QueryCopies<T, kTileM, kD, kThreads> copy_grad_o(
        query_rows(p, TESSERA_DO, sequence, head0, 0, 1, 0), query_begin, steps, p.dv);
    if (kInTurn && threadIdx.x == 0) {
      smem.turns = DqTurns(sequence.band, key0, args.order && !args.order->overlap);
    }
    // A thread has a row of lse or of delta.
    const float* from = (threadIdx.x < kTileM ? args.b.lse : args.b.delta) +
                        statistics_at(p, sequence, head0) + query_begin + threadIdx.x % kTileM;
    const float* const statistics0 = from;
    QueryCopies<T, kTileM, kTileN, kThreads> copy_bias(
        bias_rows(p, sequence, head0, key0), query_begin, steps, sequence.k.length - key0);
    const auto load_bias = [&] {
      if (is_on<kFeatures, kBias>(p)) {
        copy_bias.next(smem.bias);
        commit_copies();
      }
    };
    // Moves the copies to step `next`, where steps are left out.
    const auto seek = [&] {
      if constexpr (kSkips) {
        const int head = next / steps, step = next % steps;
        copy_q.seek(head, step);
        copy_grad_o.seek(head, step);
        copy_bias.seek(head, step);
        from = statistics0 + int64_t{head} * p.sq + step * kTileM;
      }
    };
    const auto load_q = [&](int buffer) {
      const int valid_rows = copy_q.valid();
      const bool ends_head = copy_q.ends_head();
      copy_q.next(smem.q[buffer]);
      if (threadIdx.x < 2 * kTileM) {
        const bool here = static_cast<int>(threadIdx.x) % kTileM < valid_rows;
        copy_async<4>(smem.statistics[buffer].lse + threadIdx.x, here ? from : args.b.lse,
                      here ? 4 : 0);
      }
      if constexpr (kSkips) {  // of 128 keys, or of the 64 that the tile has
        if (args.blocks.bits && threadIdx.x < kTileM) {
          constexpr int kBytes = kTileN / 8;
          copy_async<kBytes>(
              smem.bits[buffer] + threadIdx.x,
              mask_row(args.blocks, sequence, head0 + next / steps,
                       query_begin + next % steps * kTileM + static_cast<int>(threadIdx.x)) +
                  key0 / 32,
              kBytes);
        }
      }
      from += ends_head ? p.sq - (steps - 1) * kTileM : kTileM;
      commit_copies();
    };
    const auto load_grad_o = [&](int buffer) {
      copy_grad_o.next(smem.grad_o[buffer % kStages]);
      commit_copies();
    };
    seek();
    load_q(0);
    load_grad_o(0);
    load_bias();

    const float scale = logit_scale<T>(p);
    Dropout dropout;
    if (is_on<kFeatures, kDropout>(p)) dropout = dropout_of(p);
    const int slot0 = slot_of_block<SideOfQueries>(p, sequence.n, sequence.q.first, kTileM, 0);
    const int end_head = head0 + p.group;
    int head = head0 + (kSkips ? next / steps : 0), buffer = 0;
    int query0 = query_begin + (kSkips ? next % steps * kTileM : 0);
    const Interval clean = sequence.band.rows_of_all(key0, key0 + kTileN);
    const auto is_clean = [&] { return query0 >= clean.lo && query0 + kTileM <= clean.hi; };

    const auto run = [&](auto masked) {
      const bool more = kSkips ? next < total : query0 + kTileM < query_end || head + 1 < end_head;
      const T *q = smem.q[buffer], *grad_o = smem.grad_o[buffer % kStages];
      wait_for_copies<0>();
      __syncthreads();  // Q(j) and dO(j) are there, and what j - 1 had of Q, P and dS has been used
      if (kInTurn && threadIdx.x == 0) smem.turns.pass_on();
      if (more) {
        seek();
        load_q(buffer ^ 1);
        if constexpr (kStages == 2) load_grad_o(buffer ^ 1);
      }

      [[maybe_unused]] float slope;
      if (is_on<kFeatures, kAlibi>(p)) slope = slope_of(p, sequence.n, head) * kLog2e;

      // S^T = K Q^T, dP^T = V dO^T
      float s[kRowTiles][kColumns / 2], ds[kRowTiles][kColumns / 2];
      clear(s);
      clear(ds);
      multiply_rows<T, kRowTiles, kColumns, kD>(s, smem.k, warp_row,
                                                q + column0 * kSmemStride<T, kD>);
      multiply_rows<T, kRowTiles, kColumns, kD>(ds, smem.v, warp_row,
                                                grad_o + column0 * kSmemStride<T, kD>);

      [[maybe_unused]] uint32_t kept[kRowTiles][1];
      if (is_on<kFeatures, kDropout>(p)) {
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
          dropout_bits_of_patches<kColumns, Major::kKeys, 2>(
              dropout, head_index_of(p, sequence.n, head), key0 + warp_row + 16 * r,
              query0 + column0, kept[r]);
#pragma unroll
          for (int e = 0; e < kColumns / 2; ++e) {
            ds[r][e] = kept[r][0] >> e & 1 ? ds[r][e] * p.dropout_scale : 0.f;
          }
        }
      }
      // dP - delta, which times P is dX
      const float* delta = smem.statistics[buffer].delta + column0 + lane_minor();
#pragma unroll
      for (int e = 0; e < kColumns / 2; e += 4) {
        const float2 delta2 = *reinterpret_cast<const float2*>(delta + 2 * e);
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
          for (int i = e; i < e + 4; ++i) ds[r][i] -= i % 2 ? delta2.y : delta2.x;
        }
      }
      // logits
      const TileRows rows{query0, head, 1};
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        const int row0 = warp_row + 16 * r;
        if constexpr (!kRaw) make_logits<kFeatures>(p, scale, s[r], ds[r]);
        if (is_on<kFeatures, kBias>(p)) {
#pragma unroll
          for (int n = 0; n < kColumns; n += 16) {
            add_bias<T>(s[r] + n / 2, Mma<T>::load_a_transposed(smem.bias, kSmemStride<T, kTileN>,
                                                                column0 + n, row0));
          }
        }
        if (is_on<kFeatures, kAlibi>(p)) {
          for_each_distance<kColumns, Major::kKeys>(
              sequence, rows, key0 + row0, column0,
              [&](int e, int, float distance) { s[r][e] -= slope * distance; });
        }
      }
      if constexpr (decltype(masked)::value) {
        if constexpr (kSkips) {
          if (args.blocks.bits) {
            apply_mask_bits_transposed<kRowTiles, kColumns>(s, smem.bits[buffer] + column0,
                                                            warp_row / 32);
          }
        }
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
          if constexpr (kSkips) {
            apply_data_masks<kColumns, Major::kKeys, false>(s[r], p, sequence, rows,
                                                            key0 + warp_row + 16 * r, column0);
          }
          if (!kSkips || !is_clean()) {
            apply_band<kColumns, Major::kKeys>(s[r], sequence.band, rows, key0 + warp_row + 16 * r,
                                               column0);
          }
        }
      }
      // P = 2^(x - lse), dS = P dX
      constexpr bool kHides = (kFeatures & kBias) != 0 || (kSkips && decltype(masked)::value);
      const float* lse = smem.statistics[buffer].lse + column0 + lane_minor();
#pragma unroll
      for (int e = 0; e < kColumns / 2; e += 4) {
        const float2 lse2 = *reinterpret_cast<const float2*>(lse + 2 * e);
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
          for (int i = e; i < e + 4; ++i) {
            s[r][i] = exp2_approx((kRaw ? s[r][i] * scale : s[r][i]) - (i % 2 ? lse2.y : lse2.x));
            ds[r][i] *= s[r][i];
            // dP of what a mask or the bias hides may be NaN.
            if (kHides && s[r][i] == 0) ds[r][i] = 0;
          }
        }
      }
      if (is_on<kFeatures, kDropout>(p)) {
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
          for (int e = 0; e < kColumns / 2; ++e) s[r][e] = kept[r][0] >> e & 1 ? s[r][e] : 0.f;
        }
      }
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        const int at = (warp_row + 16 * r) * kSmemStride<T, kTileM> + column0;
        store_fragment<T, kTileM, kColumns>(smem.probability + at, s[r]);
        store_fragment<T, kTileM, kColumns>(smem.ds + at, ds[r]);
      }
      __syncthreads();  // P^T and dS^T are there, and the bias has been used
      if (more) load_bias();

      multiply_row_tiles<T, kRowTiles, kOut, kTileM, kD>(dv, smem.probability, warp_row, grad_o,
                                                         first);
      if constexpr (kStages == 1) {
        __syncthreads();  // dO's buffer is free
        if (more) load_grad_o(0);
      }
      multiply_row_tiles<T, kRowTiles, kOut, kTileM, kD>(dk, smem.ds, warp_row, q, first);
      if (!kInTurn || args.dq_sums) {
        add_dq<T, kD, kWarps, kTileM, kTileN, kInTurn>(args, head, slot0 + query0 / kTileM, query0,
                                                       smem.ds, smem.k, smem.turns);
      }
      buffer ^= 1;
      if constexpr (kSkips) {
        head = head0 + next / steps;
        query0 = query_begin + next % steps * kTileM;
      } else {
        query0 += kTileM;
        if (query0 == query_end) {
          query0 = query_begin;
          ++head;
        }
      }
    };

    if constexpr (kSkips) {
      int step = next;
      while (step < total) {
        const bool whole = walk.full(step) && is_clean();
        next = walk.next(view_of);
        if (whole) {
          run(std::false_type{});
        } else {
          run(std::true_type{});
        }
        step = next;
      }
    } else
      while (head < end_head) {
        if (!is_clean()) {
          run(std::true_type{});
        } else {
          do {
            run(std::false_type{});
          } while (head < end_head && is_clean());
        }
      }
  }

  __syncthreads();  // k and v have been used
  if (kInTurn && steps > 0 && threadIdx.x == 0) smem.turns.pass_on();
  if (args.outputs & kDk && p.tensor[TESSERA_DK].data) {
    write_gradient<T, kD, kOut, kRowTiles, kTileN, kThreads>(p, TESSERA_DK, sequence.k, key0,
                                                             kv_head, p.softmax_scale, p.dqk, dk,
                                                             warp_row, first, smem.k);
  }
  if (args.outputs & kDv && p.tensor[TESSERA_DV].data) {
    write_gradient<T, kD, kOut, kRowTiles, kTileN, kThreads>(p, TESSERA_DV, sequence.k, key0,
                                                             kv_head, p.dropout_scale, p.dv, dv,
                                                             warp_row, first, smem.v);
  }
}

template <typename T, typename Row>
Code make_fused_lean() {
  constexpr Tile kTile = Row::kTile;
  constexpr uint32_t kFeatures = Row::kFeatures;
  constexpr int kBucket = kTile.bucket, kRowTiles = kTile.row_tiles, kWarps = kTile.warps,
                kStep = kTile.step, kStages = kTile.stages;
  static_assert(sizeof(T) == 2 && kFeatures != kGeneral);
  static_assert(kTile.sharing == lean_sharing(kBucket, kRowTiles));
  static_assert(
      holds<LeanBackwardStorage<T, kBucket, kRowTiles, kWarps, kStep, kStages, kFeatures>>(kTile));
  const void* in_turn = nullptr;
  if constexpr (kFeatures == kLean) {
    in_turn = reinterpret_cast<const void*>(
        &backward_fused_lean_kernel<T, kBucket, kRowTiles, kWarps, kStep, kStages, true, kLean>);
  }
  return {
      reinterpret_cast<const void*>(&backward_fused_lean_kernel<T, kBucket, kRowTiles, kWarps,
                                                                kStep, kStages, false, kFeatures>),
      reinterpret_cast<const void*>(&finish_dq_kernel<T, kBucket, kWarps, kStep>), in_turn};
}

}  // namespace tessera::cuda::sm80
