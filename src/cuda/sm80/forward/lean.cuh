// SPDX-License-Identifier: Apache-2.0
// Forward pass of 16-bit elements where rows are aligned: forward/general.cuh without a branch in
// the loop but those of its features, a set chosen when the kernel is compiled. Steps that the band
// or a mask cuts run a second copy of the loop's body; only the first step may meet the end of the
// keys.
//
//     copies    V(j) ........... K(j-1) ..........      steps go from the last keys to the first
//     warps     wait K | S(j) | wait V | softmax | O += P V | wait K ...
#pragma once

#include <type_traits>

#include "cuda/sm80/features.cuh"
#include "cuda/sm80/forward/tile.cuh"

namespace tessera::cuda::sm80 {

template <typename T, int kD, int kDv, int kRowTiles, int kWarps, int kTileN, unsigned kFeatures>
struct LeanForwardStorage {
  static constexpr int kTileM = 16 * kRowTiles * kWarps;
  T q[kTileM * kSmemStride<T, kD>];
  T k[kTileN * kSmemStride<T, kD>];
  T v[kTileN * kSmemStride<T, kDv>];
  T bias[kFeatures & kBias ? kTileM * kSmemStride<T, kTileN> : 8];
  uint2 bits[kFeatures & kMasks ? kTileM : 1];  // of a dense mask, by rows
  ForwardTile tile;  // up to d128, what the loop does not need waits where it costs no registers
  KeyBlocks blocks;  // read with kMasks
};

// The steps of a tile's walk from its last keys to its first, of which the band hides nothing.
struct CleanSteps {
  int begin, end;
  __device__ bool contain(int step) const { return begin <= step && step < end; }
};
// hi: of keys that may be in such a step.
template <int kTileN>
__device__ __forceinline__ CleanSteps clean_steps(const ForwardTile& tile, int steps, int hi) {
  const int last_key0 = tile.key_begin + (steps - 1) * kTileN, first_row = tile.rows.origin;
  const Interval clean = tile.sequence.band.keys_of_all(first_row, first_row + tile.queries);
  return {max(last_key0 + 2 * kTileN - 1 - min(clean.hi, hi), 0) / kTileN,
          last_key0 < clean.lo ? 0 : min(steps, (last_key0 - clean.lo) / kTileN + 1)};
}

// 1 where what ALiBi takes from a row, relative to the tile's first, may wait for the end of the
// walk: 128 rows are then less than 2^10, whose last digit is 2^-14 of a logit.
__device__ __forceinline__ float share_of_rows(float slope) { return fabsf(slope) < 8 ? 1.f : 0.f; }

template <typename T, int kD, int kDv, int kRowTiles, int kWarps, int kTileN, unsigned kFeatures>
__global__ void __launch_bounds__(32 * kWarps, kWarps == 4 ? 2 : 1)
    forward_lean_kernel(const __grid_constant__ ForwardArgs args) {
  using Storage = LeanForwardStorage<T, kD, kDv, kRowTiles, kWarps, kTileN, kFeatures>;
  constexpr int kThreads = 32 * kWarps, kTileM = Storage::kTileM;
  // Shared memory bounds one row tile a warp: what registers hold of q need not be read again.
  constexpr int kHeld = kRowTiles > 1 ? 0 : kD <= 192 ? kD : 64;
  constexpr bool kHolds = kD <= 128, kSkips = (kFeatures & kMasks) != 0;
  constexpr bool kRaw = (kFeatures & kOfLogits) == 0;
  extern __shared__ __align__(16) char shared[];
  Storage& smem = *reinterpret_cast<Storage*>(shared);
  const Params& p = args.params;
  const int warp_row = threadIdx.x / 32 * 16 * kRowTiles;

  SoftmaxRows softmax[kRowTiles];
  float o[kRowTiles][kDv / 2];
  const float raw_scale = logit_scale<T>(p), scale = kRaw ? raw_scale : 1.f;
  const ForwardTile tile = forward_tile<kTileM, kTileN, kDv>(args);
  if (!tile.exists()) return;
  if (kHolds && threadIdx.x == 0) smem.tile = tile;
  const ForwardTile& held = kHolds ? smem.tile : tile;
  clear(o);
  const int steps = tile.steps(kTileN), last_key0 = tile.key_begin + (steps - 1) * kTileN;
  const auto key_of = [&](int step) { return last_key0 - step * kTileN; };
  if constexpr (kSkips) {
    if (threadIdx.x < 32) {
      smem.blocks = KeyBlocks::of(args.blocks, p, tile.sequence, tile.rows.head0, 1,
                                  tile.rows.origin, tile.queries);
    }
    __syncthreads();
  }
  const auto view_of = [&](int step) { return smem.blocks(key_of(step) / kTileN); };
  BlockWalk<kSkips> walk(steps);
  const int first = walk.next(view_of);
  if (first < steps) {
    const int head0 = tile.rows.head0;
    load_query_tile<T, kTileM, kD, kThreads>(smem.q, p, tile);
    const KeyRows k_rows = key_rows(p, TESSERA_K, tile.sequence, head0, args.pack);
    const KeyRows v_rows = key_rows(p, TESSERA_V, tile.sequence, head0, args.pack);
    KeyCopies<T, kTileN, kD, kThreads> copy_k(k_rows.base, k_rows.row_bytes, key_of(first), p.dqk);
    KeyCopies<T, kTileN, kDv, kThreads> copy_v(v_rows.base + tile.dv_first * sizeof(T),
                                               v_rows.row_bytes, key_of(first), tile.dv_here);
    const int valid = min(tile.sequence.k.length - key_of(first), kTileN);
    // A warp's rows of the bias are its own.
    T* const bias = smem.bias + warp_row * kSmemStride<T, kTileN>;
    BiasCopies<T, 16 * kRowTiles, kFeatures & kBias ? kTileN : 64> copy_bias;
    const void* const any_bias = p.tensor[TESSERA_BIAS].data;
    if (is_on<kFeatures, kBias>(p)) {
      copy_bias = {bias_rows(p, tile.sequence, head0, 0), tile.rows.origin + warp_row,
                   key_of(first), tile.sequence.k.length};
      copy_bias.next(bias, 0, any_bias);
    }
    // So are they of a dense mask, whose bits a lane copies for one row.
    const auto copy_bits = [&](int step) {
      const int lane = threadIdx.x % 32;
      if (!args.blocks.bits || lane >= 16 * kRowTiles) return;
      copy_async<8>(smem.bits + warp_row + lane,
                    mask_row(args.blocks, held.sequence, held.rows.head0,
                             held.rows.origin + warp_row + lane) +
                        key_of(step) / 32,
                    8);
      commit_copies();
    };
    if constexpr (kSkips) copy_bits(first);
    copy_k.first(smem.k, valid);
    copy_v.first(smem.v, valid);
    // What ALiBi takes from a whole row waits for the end. The rest is a function of the column
    // alone if all keys stand before the tile's first diagonal. Steep slopes would lose digits.
    float slope = 0, share = 0;
    if (is_on<kFeatures, kAlibi>(p)) {
      slope = slope_of(p, tile.sequence.n, head0) * kLog2e;
      share = share_of_rows(slope);
    }
    Dropout dropout;
    if (is_on<kFeatures, kDropout>(p)) dropout = dropout_of(p);

    HeldColumns<T, kHeld> held_q;
    if constexpr (kHeld > 0) {
      wait_for_copies<1>();
      __syncthreads();
#pragma unroll
      for (int k = 0; k < kHeld; k += 16) {
        held_q.step[k / 16] = Mma<T>::load_a(smem.q, kSmemStride<T, kD>, warp_row, k);
      }
    }
    const CleanSteps clean =
        clean_steps<kTileN>(tile, steps,
                            !is_on<kFeatures, kAlibi>(p) ? tile.sequence.k.length
                            : share == 0                 ? 0
                                         : tile.rows.origin + tile.sequence.band.shift + 1);
    int before = first;  // the step before this one
    const auto run = [&](int step, int next, auto masked) {
      if (step == first) {
        wait_for_copies<1>();
      } else {
        wait_for_copies<0>();
      }
      __syncthreads();  // K(j) is there, and V's buffer is free
      if (step > first) {
        if constexpr (kSkips) copy_v.skip(step - before - 1);
        copy_v.next(smem.v);
      }
      before = step;

      // S = Q K^T
      float s[kRowTiles][kTileN / 2];
      clear(s);
      multiply_rows<T, kRowTiles, kTileN, kD, kHeld>(s, smem.q, warp_row, smem.k, held_q);
      [[maybe_unused]] uint32_t kept[kRowTiles][1];
      if (is_on<kFeatures, kDropout>(p)) {
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
          dropout_bits_of_patches<64, Major::kQueries, 4>(
              dropout, head_index_of(p, held.sequence.n, held.rows.head0),
              held.rows.origin + warp_row + 16 * r, key_of(step), kept[r]);
        }
      }
      wait_for_copies<0>();
      __syncthreads();  // V(j) is there, and K's buffer is free
      if (next < steps) {
        if constexpr (kSkips) copy_k.skip(next - step - 1);
        copy_k.next(smem.k);
      }
      // logits
      if constexpr (!kRaw) {
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) make_logits<kFeatures>(p, raw_scale, s[r]);
      }
      if (is_on<kFeatures, kBias>(p)) {
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
          for (int n = 0; n < kTileN; n += 16) {
            add_bias<T>(s[r] + n / 2, Mma<T>::load_a(bias, kSmemStride<T, kTileN>, 16 * r, n));
          }
        }
        __syncwarp();  // the bias has been used
        if (next < steps) copy_bias.next(bias, next - step, any_bias);
      }
      if (is_on<kFeatures, kAlibi>(p)) {
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
          int row0 = warp_row + 16 * r, column0 = key_of(step);
          // What depends on them is not to be computed ahead and held.
          asm volatile("" : "+r"(row0), "+r"(column0));
          if constexpr (decltype(masked)::value) {
            for_each_distance<kTileN, Major::kQueries>(
                held.sequence, held.rows, row0, column0, [&](int e, int row, float distance) {
                  s[r][e] -= slope * (distance - share * static_cast<float>(row));
                });
          } else {
            const int behind = column0 + lane_minor() - held.rows.origin - held.sequence.band.shift;
            const float first_column = slope * static_cast<float>(behind);
#pragma unroll
            for (int i = 0; i < kTileN / 4; ++i) {
              const float column = first_column + slope * static_cast<float>(8 * (i / 2) + i % 2);
              s[r][4 * (i / 2) + i % 2] += column;
              s[r][4 * (i / 2) + 2 + i % 2] += column;
            }
          }
        }
      }
      if constexpr (kSkips) {
        if (args.blocks.bits) {
          if (decltype(masked)::value) apply_mask_bits(s, smem.bits + warp_row);
          __syncwarp();  // they have been used
          if (next < steps) copy_bits(next);
        }
      }

      // P = 2^(x - m), the A operand of the next product
      typename Mma<T>::A weights[kRowTiles][kTileN / 16];
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        if constexpr (decltype(masked)::value) {
          int row0 = warp_row + 16 * r, column0 = key_of(step);
          if constexpr (kSkips) {
            asm volatile("" : "+r"(row0), "+r"(column0));  // nor this
            apply_data_masks<kTileN, Major::kQueries, false>(s[r], p, held.sequence, held.rows,
                                                             row0, column0);
          }
          if (!kSkips || !clean.contain(step)) {
            apply_band<kTileN, Major::kQueries>(s[r], held.sequence.band, held.rows, row0, column0);
          }
        }
        float rescale[2];
        softmax[r].template update<kTileN, kRaw, (kFeatures & kBias) != 0>(s[r], scale, rescale);
#pragma unroll
        for (int e = 0; e < kDv / 2; ++e) o[r][e] *= rescale[e / 2 % 2];
        if (is_on<kFeatures, kDropout>(p)) {
#pragma unroll
          for (int e = 0; e < kTileN / 2; ++e) s[r][e] = kept[r][0] >> e % 32 & 1 ? s[r][e] : 0.f;
        }
#pragma unroll
        for (int k = 0; k < kTileN / 16; ++k) {
          weights[r][k] = Mma<T>::from_accumulator(s[r] + 8 * k, 1);
        }
      }

      // O += P V
#pragma unroll
      for (int k = 0; k < kTileN; k += 16) {
#pragma unroll
        for (int n = 0; n < kDv; n += 16) {
          const auto b = Mma<T>::load_b_transposed(smem.v, kSmemStride<T, kDv>, k, n);
#pragma unroll
          for (int r = 0; r < kRowTiles; ++r) {
            Mma<T>::multiply(o[r] + n / 2, weights[r][k / 16], b);
          }
        }
      }
    };

    int step = first;
    if constexpr (kSkips) {
      while (step < steps) {
        const bool whole = walk.full(step) && clean.contain(step);
        const int next = walk.next(view_of);
        if (whole) {
          run(step, next, std::false_type{});
        } else {
          run(step, next, std::true_type{});
        }
        step = next;
      }
    } else {
      while (step < steps) {
        if (!clean.contain(step)) {
          run(step, step + 1, std::true_type{});
          ++step;
        } else {
          do {
            run(step, step + 1, std::false_type{});
          } while (++step < clean.end);
        }
      }
    }
  }
  if (kHolds) __syncthreads();  // the tile is there
  if (is_on<kFeatures, kAlibi>(p)) {
    const float slope = slope_of(p, held.sequence.n, held.rows.head0) * kLog2e;
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        softmax[r].max[half] -= slope * share_of_rows(slope) *
                                static_cast<float>(warp_row + 16 * r + 8 * half + lane_major());
      }
    }
  }
  write_results<T, kD, kDv, kRowTiles>(args, held, softmax, scale, 1.f, o, warp_row, smem.q);
}

template <typename T, typename Row>
Code make_lean() {
  constexpr Tile kTile = Row::kTile;
  constexpr int kDv = output_columns(kTile.bucket);
  static_assert(sizeof(T) == 2 && Row::kFeatures != kGeneral);
  static_assert(holds<LeanForwardStorage<T, kTile.bucket, kDv, kTile.row_tiles, kTile.warps,
                                         kTile.step, Row::kFeatures>>(kTile));
  return {
      reinterpret_cast<const void*>(&forward_lean_kernel<T, kTile.bucket, kDv, kTile.row_tiles,
                                                         kTile.warps, kTile.step, Row::kFeatures>)};
}

}  // namespace tessera::cuda::sm80
