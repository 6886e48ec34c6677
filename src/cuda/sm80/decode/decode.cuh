// SPDX-License-Identifier: Apache-2.0
// Forward pass for few queries: bound by the bytes of K and V, so everything serves to keep loads
// in flight.
//
// A CTA owns 16 rows (queries by `pack` heads that share keys) and a run of keys. Each warp takes
// every kWarps-th block of kKeys keys with a softmax and an O of its own, and a ring of kStages
// blocks that it alone fills and drains: until the end, warps never meet.
//
//     warp w    copies  block w + (s + 2) W ......
//               S = Q K^T | softmax | O += P V     on block w + s W
//     at last   o = sum_w 2^(m_w - m) O_w / l
#pragma once

#include "cuda/sm80/args.h"
#include "cuda/sm80/kernels.h"
#include "cuda/sm80/machine/epilogue.cuh"
#include "cuda/sm80/softmax.cuh"

namespace tessera::cuda::sm80 {

template <typename T, int kD, int kWarps, int kKeys>
struct DecodeStorage {
  static constexpr int kStages = kD * sizeof(T) <= 256 ? 3 : 2;
  struct Stage {
    T k[kKeys * kSmemStride<T, kD>];
    T v[kKeys * kSmemStride<T, kD>];
  };
  T q[kDecodeRows * kSmemStride<T, kD>];
  union {
    Stage ring[kWarps][kStages];
    struct {
      float o[kWarps][kDecodeRows][kD + 4];
      float max[kWarps][kDecodeRows], sum[kWarps][kDecodeRows];
    } parts;
  };
};

template <typename T, int kD, int kWarps, int kKeys, bool kRich>
__global__ void __launch_bounds__(32 * kWarps)
    decode_kernel(const __grid_constant__ ForwardArgs args) {
  using Storage = DecodeStorage<T, kD, kWarps, kKeys>;
  constexpr int kThreads = 32 * kWarps, kStages = Storage::kStages, kStep = Mma<T>::kK;
  extern __shared__ __align__(16) char shared[];
  Storage& smem = *reinterpret_cast<Storage*>(shared);
  const Params& p = args.params;

  const int queries = kDecodeRows / args.pack;
  const TileOfRows tile = tile_of_slot<SideOfQueries>(p, blockIdx.x, queries);
  const Sequence sequence = sequence_of(p, tile.n);
  if (tile.begin >= sequence.q.owned_hi) return;
  const int head0 = blockIdx.y * args.pack, split = blockIdx.z;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const TileRows rows{tile.begin, head0, args.pack};
  const Interval clean_keys = sequence.band.keys_of_all(tile.begin, tile.begin + queries);

  // ---- this split's blocks of keys ----
  const Interval visible = sequence.band.keys(tile.begin, tile.begin + queries);
  const int first_key = visible.lo / kKeys * kKeys;
  const int all_blocks = visible.empty() ? 0 : (visible.hi - first_key + kKeys - 1) / kKeys;
  const int blocks_a_split = (all_blocks + args.splits - 1) / args.splits;
  const int block_end = min(all_blocks, (split + 1) * blocks_a_split);
  const int block_begin = split * blocks_a_split + warp;

  const KeyRows k_rows = key_rows(p, TESSERA_K, sequence, head0, args.pack);
  // Made for each block where registers are dearer.
  constexpr bool kHoldsV = !kRich || kD < 256;
  const auto v_rows_of = [&] { return key_rows(p, TESSERA_V, sequence, head0, args.pack); };
  const KeyRows v_held = v_rows_of();
  const auto load = [&](int block, int stage) {
    if (block < block_end) {
      const int key0 = first_key + block * kKeys;
      load_keys<T, kKeys, kD, 32, kRich, true>(smem.ring[warp][stage].k, k_rows, key0, p.dqk,
                                               p.tensor[TESSERA_K], lane);
      load_keys<T, kKeys, kD, 32, kRich, true>(smem.ring[warp][stage].v,
                                               kHoldsV ? v_held : v_rows_of(), key0, p.dv,
                                               p.tensor[TESSERA_V], lane);
    }
    commit_copies();  // empty at the end, so that counting stays simple
  };

  const QueryRows q_rows =
      query_rows(p, TESSERA_Q, sequence, head0, tile.begin, args.pack, queries * args.pack);
  load_tile<T, kDecodeRows, kD, kThreads>(smem.q, q_rows, p.dqk, p.tensor[TESSERA_Q]);
  commit_copies();
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) load(block_begin + s * kWarps, s);
  wait_for_copies<kStages - 1>();
  meet_and_split<T, kD, kWarps, kDecodeRows>(smem.q);  // Q is there
  typename Mma<T>::A q[kSplits<T> ? 1 : kD / kStep];   // fp32 has no registers for it
#pragma unroll
  for (int k = 0; !kSplits<T> && k < kD / kStep; ++k) {
    q[k] = Mma<T>::load_a(smem.q, kSmemStride<T, kD>, 0, k * kStep);
  }

  // ---- the loop over keys ----
  SoftmaxRows softmax;
  float o[kD / 2];
#pragma unroll
  for (float& x : o) x = 0;
  const float scale = kRich ? kToLog2<T> : logit_scale<T>(p) * kToLog2<T>;
  int stage = 0;
  for (int block = block_begin; block < block_end; block += kWarps) {
    wait_for_copies<kStages - 2>();
    __syncwarp();  // all lanes' copies are there, and the stage to be filled has been used
    load(block + (kStages - 1) * kWarps, stage == 0 ? kStages - 1 : stage - 1);
    const int key0 = first_key + block * kKeys;
    auto& here = smem.ring[warp][stage];
    stage = stage + 1 == kStages ? 0 : stage + 1;
    if constexpr (kSplits<T>) {
      split_tile<T, kKeys, kD, 1>(here.k, 0);
      split_tile<T, kKeys, kD, 1>(here.v, 0);
      __syncwarp();
    }

    // S = Q K^T
    float s[kKeys / 2];
#pragma unroll
    for (float& x : s) x = 0;
    if constexpr (kSplits<T>) {
      multiply_nt<T, kKeys, kD>(s, smem.q, 0, here.k, p.dqk);
    } else {
#pragma unroll
      for (int k = 0; k < kD / kStep; ++k) {
#pragma unroll
        for (int n = 0; n < kKeys; n += 16) {
          Mma<T>::multiply(s + n / 2, q[k],
                           Mma<T>::load_b(here.k, kSmemStride<T, kD>, n, k * kStep));
        }
      }
    }

    // P = 2^(x - m)
    const bool clean = key0 >= clean_keys.lo && key0 + kKeys <= clean_keys.hi;
    if constexpr (kRich) {
      shape_scores<T, kKeys, Major::kQueries>(s, nullptr, p, sequence, rows, 0, key0, clean);
    } else if (!clean) {
      apply_band<kKeys, Major::kQueries>(s, sequence.band, rows, 0, key0);
    }
    float rescale[2];
    softmax.template update<kKeys, !kRich && !kSplits<T>, kRich>(s, scale, rescale);
    if (__any_sync(~0u, rescale[0] != 1 || rescale[1] != 1)) {
#pragma unroll
      for (int e = 0; e < kD / 2; ++e) o[e] *= rescale[e / 2 % 2];
    }

    // O += P V
    multiply_nn<T, kD, kKeys, kD>(o, s, here.v, 0, p.dv);
  }

  // ---- the warps' parts, then the rows ----
  wait_for_copies<0>();
  __syncthreads();  // the rings are free
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = lane_major() + 8 * half;
    const float sum = softmax.total(half);
    if (lane % 4 == 0) {
      smem.parts.max[warp][row] = softmax.max[half] * scale;
      smem.parts.sum[warp][row] = sum;
    }
#pragma unroll
    for (int i = 0; i < kD / 8; ++i) {
      float* at = &smem.parts.o[warp][row][8 * i + lane_minor()];
      at[0] = o[4 * i + 2 * half];
      at[1] = o[4 * i + 2 * half + 1];
    }
  }
  __syncthreads();
  constexpr int kThreadsARow = kThreads / kDecodeRows;
  const int row = threadIdx.x / kThreadsARow, column0 = threadIdx.x % kThreadsARow;
  const int query = rows.query(row), head = rows.head(row);
  if (row >= queries * args.pack || query < sequence.q.owned_lo || query >= sequence.q.owned_hi)
    return;
  float max = -kInfinity, sum = 0, weight[kWarps];
#pragma unroll
  for (int w = 0; w < kWarps; ++w) max = fmaxf(max, smem.parts.max[w][row]);
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    weight[w] = exp2_approx(smem.parts.max[w][row] - (max == -kInfinity ? 0 : max));
    sum += weight[w] * smem.parts.sum[w][row];
  }
  const bool exists = query >= 0 && query < sequence.q.length;
  const View& max_logit = p.tensor[TESSERA_MAX_LOGIT];
  if (max_logit.data && exists && column0 == 0 && sum != 0) {
    atomic_max(static_cast<float*>(max_logit.data) + head * max_logit.stride[0], max * kLn2);
  }
  const RowResult result = finish_row(p, head, max, sum, split == 0 && exists);
  const float factor = result.factor * (kRich ? v_scale_of(p, tile.n, head0) : 1.f);
  const int64_t stored = sequence.q.first + query;
  const View& out = p.tensor[TESSERA_O];
  const View& lse = p.tensor[TESSERA_LSE];
  const int64_t partial_at =
      (split * args.rows + int64_t{sequence.q.batch} * p.sq + stored) * p.hq + head;
  const bool final = args.splits == 1;
  const int64_t at = final ? offset_of(out, sequence.q.batch, stored, head) : partial_at * p.dv;
  for (int c = column0; c < p.dv; c += kThreadsARow) {
    float value = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) value += weight[w] * smem.parts.o[w][row][c];
    store_float(final ? out.data : args.partial_o, at + c, final ? out.dtype : TESSERA_FP32,
                sum == 0 ? 0.f : value * factor);
  }
  if (column0 != 0) return;
  if (!final) {
    args.partial_lse[partial_at] = result.lse;
  } else if (lse.data) {
    static_cast<float*>(lse.data)[offset_of(lse, sequence.q.batch, head, stored)] = result.lse;
  }
}

template <typename T, typename Row>
Code make_decode() {
  constexpr Tile kTile = Row::kTile;
  static_assert(kTile.row_tiles == 1 && kTile.bucket <= 256);
  static_assert(holds<DecodeStorage<T, kTile.bucket, kTile.warps, kTile.step>>(kTile));
  return {reinterpret_cast<const void*>(
      &decode_kernel<T, kTile.bucket, kTile.warps, kTile.step, Row::kFeatures == kGeneral>)};
}

}  // namespace tessera::cuda::sm80
