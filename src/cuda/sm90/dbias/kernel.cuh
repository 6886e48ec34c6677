// SPDX-License-Identifier: Apache-2.0
// Gradients that are sums over scores, on Hopper, without atomics: reproducible bit for bit. dbias
// of every broadcast, and dalibi_slopes, which is the same sum with the distances as weights.
//
//     dbias = sum over broadcast axes of P (dP keep - delta)     (pre-scale: times what follows it)
//
// S = Q K^T and dP = dO V^T are made again, 64 queries at a time, by two warpgroups of 64 keys
// each; a third has one thread that feeds them. The sum stays in registers:
//
//   rows and keys       an item is a tile of keys; for each block of queries of the bias the CTA
//                       adds up all sequences and heads that share it, and stores the block. Where
//                       K and V of all of them fit in shared memory (resident) they are read once.
//   one query for all   an item is a tile of keys and a share of the sequences, heads and blocks of
//                       queries
//   one key for all     an item is a block of queries, or a share of them, and all keys
//
// The last two end in dbias_sum, which adds what items and warps have stored. CTAs side by side
// walk side by side, so that the bias is read and written in whole rows.
//
// A slot holds a visit: a tile of keys of one head of one sequence. The thread that copies tells
// the warpgroups by a queue of commands what to add to which sum and when to store it.
//
//   barrier            arrivals             says
//   commands.full[s]   1                    a command is written down
//   commands.empty[s]  8 (a warp each)      the warpgroups have read it
//   kv.full[s]         1 + bytes            K and V of a visit have arrived
//   kv.empty[s]        8                    the warpgroups are done with it
//   q.full[s]          1 + bytes            a block of Q and dO, its statistics and, in plain
//                                           kernels, its bias have arrived
//   q.empty[s]         8                    both have used them
//
// A plain kernel is for biases with rows and keys whose tiles TMA can bring, where nothing else but
// the band shapes a score. It sums two blocks of queries at a time, so that K and V that are not
// resident are read half as often.
#pragma once

#include <cstddef>

#include "cuda/common/score/score.cuh"
#include "cuda/sm90/backward/fused/lean.cuh"
#include "cuda/sm90/backward/products.cuh"
#include "cuda/sm90/dbias/kernels.h"
#include "cuda/sm90/dbias/params.h"
#include "cuda/sm90/dbias/walk.cuh"
#include "cuda/sm90/machine/fragment.cuh"
#include "cuda/sm90/machine/pipeline.cuh"
#include "cuda/sm90/machine/ptx.cuh"
#include "cuda/sm90/machine/smem_tile.cuh"
#include "cuda/sm90/machine/wgmma.cuh"
#include "cuda/sm90/score/bias.cuh"

namespace tessera::cuda::sm90 {

template <typename Element, typename Row>
struct Dbias {
  static constexpr DbiasTile kTile = Row::kTile;
  static constexpr int kTileM = DbiasTile::kTileM, kTileN = DbiasTile::kTileN, kKeys = 64;
  static constexpr int kConsumers = DbiasTile::kConsumers, kWarps = 4 * kConsumers;
  // The walk needs more than the 24 that other producers have; 3 x 168 in all.
  static constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;
  static constexpr int kElements = kKeys / 2;  // of a thread
  static constexpr bool kPlain = kTile.plain;
  static constexpr int kBlocks = kPlain ? 2 : 1;  // of queries that are summed at a time
  static constexpr int kCommands = 8;             // that wait

  using QTile = SmemTile<kTileM, kTile.dqk>;
  using GradOTile = SmemTile<kTileM, kTile.dv>;
  using KTile = SmemTile<kTileN, kTile.dqk>;
  using VTile = SmemTile<kTileN, kTile.dv>;
  using BiasTile = SmemTile<kTileM, kTileN>;

  struct alignas(1024) SharedStorage {
    uint8_t k[kTile.kv_slots][KTile::kBytes], v[kTile.kv_slots][VTile::kBytes];
    uint8_t q[kTile.q_stages][QTile::kBytes], grad_o[kTile.q_stages][GradOTile::kBytes];
    uint8_t bias[kPlain ? kTile.q_stages : 1][kPlain ? BiasTile::kBytes : 16];
    float lse2[kTile.q_stages][kTileM], delta[kTile.q_stages][kTileM];
    Command commands[kCommands];
    Visit visits[kTile.kv_slots];
    uint64_t kv_barriers[2 * kTile.kv_slots], q_barriers[2 * kTile.q_stages];
    uint64_t command_barriers[2 * kCommands];
  };
  static_assert(sizeof(SharedStorage) <= 227 * 1024);

  struct Shared {
    uint32_t base;

    __device__ __forceinline__ uint32_t k(int slot) const {
      return base + offsetof(SharedStorage, k) + slot * KTile::kBytes;
    }
    __device__ __forceinline__ uint32_t v(int slot) const {
      return base + offsetof(SharedStorage, v) + slot * VTile::kBytes;
    }
    __device__ __forceinline__ uint32_t q(int stage) const {
      return base + offsetof(SharedStorage, q) + stage * QTile::kBytes;
    }
    __device__ __forceinline__ uint32_t grad_o(int stage) const {
      return base + offsetof(SharedStorage, grad_o) + stage * GradOTile::kBytes;
    }
    __device__ __forceinline__ uint32_t bias(int stage) const {
      return base + offsetof(SharedStorage, bias) + stage * BiasTile::kBytes;
    }
    __device__ __forceinline__ uint32_t command(int slot) const {
      return base + offsetof(SharedStorage, commands) + slot * sizeof(Command);
    }
    __device__ __forceinline__ uint32_t lse2(int stage) const {
      return base + offsetof(SharedStorage, lse2) + stage * kTileM * 4;
    }
    __device__ __forceinline__ uint32_t delta(int stage) const {
      return base + offsetof(SharedStorage, delta) + stage * kTileM * 4;
    }
    __device__ __forceinline__ StageBarriers<kTile.kv_slots> kv_barriers() const {
      return {base + uint32_t(offsetof(SharedStorage, kv_barriers))};
    }
    __device__ __forceinline__ StageBarriers<kTile.q_stages> q_barriers() const {
      return {base + uint32_t(offsetof(SharedStorage, q_barriers))};
    }
    __device__ __forceinline__ StageBarriers<kCommands> command_barriers() const {
      return {base + uint32_t(offsetof(SharedStorage, command_barriers))};
    }
  };

  // ---- consumer: 64 keys ----

  struct Consumer {
    const DbiasParams& a;
    const Shared shared;
    const Visit* visits;
    const int w, thread, lane;
    Ring<kTile.q_stages> q_ring;
    Ring<kCommands> command_ring;

    // What a thread has to know of a block of a visit.
    struct Block {
      const Visit& visit;
      int block, key0;  // of the warpgroup
      bool clean;
      int n, head;
    };

    __device__ __forceinline__ void run() {
      float sums[kBlocks][kElements];
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) clear(sums[i]);
#pragma unroll 1
      while (true) {
        shared.command_barriers().wait(command_ring);
        const Command command = Command::load(shared.command(command_ring.stage));
        __syncwarp();
        if (lane == 0) shared.command_barriers().release(command_ring);
        command_ring.advance();
        const int what = uniform_register(command.what), first = uniform_register(command.block),
                  sum_or_blocks = uniform_register(command.sum),
                  key0 = uniform_register(command.key0), n = command.n, head = command.head,
                  slot_and_phase = uniform_register(command.slot_and_phase);
        if (what == Command::kStop) break;
        if (what == Command::kAdd) {
          const int slot = slot_and_phase >> 1;
          const Block block{
              visits[slot], first, key0 + w * kKeys, uniform_register(command.clean) != 0, n, head};
          mbarrier_wait(shared.kv_barriers().full(slot), slot_and_phase & 1);
          if (kBlocks == 1 || sum_or_blocks == 0) add(block, slot, sums[0]);
          if constexpr (kBlocks > 1) {
            if (sum_or_blocks == 1) add(block, slot, sums[1]);
          }
        } else {
#pragma unroll
          for (int i = 0; i < kBlocks; ++i) {
            if (i < sum_or_blocks) finish(first + i, key0, n, head, command.term, sums[i]);
            clear(sums[i]);
          }
        }
        if (const int released = uniform_register(command.released)) {
          __syncwarp();
#pragma unroll
          for (int slot = 0; slot < kTile.kv_slots; ++slot) {
            if (lane == 0 && released >> slot & 1) {
              mbarrier_arrive(shared.kv_barriers().empty(slot));
            }
          }
        }
      }
    }

    static __device__ __forceinline__ void clear(float (&sum)[kElements]) {
#pragma unroll
      for (float& x : sum) x = 0;
    }

    // The next stage of Q and dO beside the K and V of `slot`, to a sum.
    __device__ __forceinline__ void add(const Block& at, int slot, float (&sum)[kElements]) {
      float S[kElements], dP[kElements];
      const int stage = q_ring.stage;
      const uint32_t rows_before = w * kKeys * kChunkRowBytes;
      const uint64_t k = KTile::k_major(shared.k(slot) + rows_before),
                     v = VTile::k_major(shared.v(slot) + rows_before);
      shared.q_barriers().wait(q_ring);
      const uint64_t q = QTile::k_major(shared.q(stage)),
                     grad_o = GradOTile::k_major(shared.grad_o(stage));
      issue_scores<Element, QTile, KTile, kTile.dqk>(S, q, k);
      issue_scores<Element, GradOTile, VTile, kTile.dv>(dP, grad_o, v);

      const int row = thread / kWarp * 16;  // of the warp, in the block
      const int first = 4 * (row + (a.in_quads ? place_in_quads(lane / 4) : lane / 4)),
                second = first + (a.in_quads ? 8 : 32);  // bytes: row lane / 4, and + 8
      const float lse2[2] = {load_shared(shared.lse2(stage) + first),
                             load_shared(shared.lse2(stage) + second)};
      const float delta[2] = {load_shared(shared.delta(stage) + first),
                              load_shared(shared.delta(stage) + second)};
      const int query = at.block * kTileM + row + lane / 4;  // and + 8
      if constexpr (kPlain) {
        uint32_t bias[kElements / 2];
        load_bias_tile(stage, row, bias);
        wgmma_wait<1>();
        pin(S);
        softmax_plain(bias, lse2, S);
        wgmma_wait<0>();
        pin(dP);
        differentiate(dP, delta, S);
      } else {
        const bool by_vectors = a.vectors && at.key0 + kKeys <= a.cut.extent[3];
        uint32_t bias[kElements];
        if (by_vectors) load_bias(at, query, bias);
        wgmma_wait<1>();
        pin(S);
        if (by_vectors) {
          add_bias(bias, lse2, S);
#pragma unroll
          for (float& s : S) s = exp2_approx(s);
          wgmma_wait<0>();
          pin(dP);
          differentiate(dP, delta, S);
        } else {
          wgmma_wait<0>();
          pin(dP);
          shaped_gradient(at, row, lse2, delta, S, dP);
        }
      }
      __syncwarp();
      if (lane == 0) shared.q_barriers().release(q_ring);
      q_ring.advance();
      if (!at.clean) mask(at, query, S);
      if (!kPlain && a.of_slopes) softmax_by_distance(at, query, S);
#pragma unroll
      for (int e = 0; e < kElements; ++e) sum[e] += S[e];
    }

    // S = P becomes P (dP - delta).
    static __device__ __forceinline__ void differentiate(const float (&dP)[kElements],
                                                         const float (&delta)[2],
                                                         float (&S)[kElements]) {
#pragma unroll
      for (int e = 0; e < kElements; ++e) S[e] *= dP[e] - delta[e / 2 % 2];
    }

    // Loads, from the tile of bias that came with the stage, the pairs that the thread has scores
    // of, in their order. row: the warp's first.
    __device__ __forceinline__ void load_bias_tile(int stage, int row,
                                                   uint32_t (&bias)[kElements / 2]) const {
      const uint32_t tile = shared.bias(stage) + w * BiasTile::kChunkBytes;
#pragma unroll
      for (int i = 0; i < kKeys / kStepK; ++i) {
        uint32_t x[4];  // of rows 0 and 1 of group 2 i, then of the next one
        ldmatrix_x4(x, BiasTile::unit(tile, row + lane % 16, 2 * i + lane / 16));
#pragma unroll
        for (int j = 0; j < 4; ++j) bias[4 * i + j] = x[j];
      }
    }
    // Raw scores to P.
    __device__ __forceinline__ void softmax_plain(const uint32_t (&bias)[kElements / 2],
                                                  const float (&lse2)[2],
                                                  float (&S)[kElements]) const {
      const float c = logit_scale<Element>(a.problem);
      const float factor = a.problem.flags & TESSERA_BIAS_PRE_SCALE ? c : kLog2e;
#pragma unroll
      for (int i = 0; i < kElements / 2; ++i) {
        const float base = -lse2[i % 2];
        float* s = S + 2 * i;
        s[0] = exp2_approx(fmaf(s[0], c, fmaf(low_element<Element>(bias[i]), factor, base)));
        s[1] = exp2_approx(fmaf(s[1], c, fmaf(high_element<Element>(bias[i]), factor, base)));
      }
    }

    // The bias of a whole block, from rows of 16-bit elements by 16 bytes, which the four threads
    // of a quad trade later, or from rows of fp32.
    __device__ __forceinline__ void load_bias(const Block& block, int my_query,
                                              uint32_t (&bias)[kElements]) const {
      const View& view = a.problem.tensor[TESSERA_BIAS];
      const int quad = lane % 4;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int query = existing(my_query + 8 * r, block.visit.sequence.q.length);
        const int64_t at = offset_of(view, block.n, block.head, query, block.key0);
        if (view.dtype == TESSERA_FP32) {
          const float* from = static_cast<const float*>(view.data) + at + 2 * quad;
#pragma unroll
          for (int g = 0; g < kKeys / 8; ++g) {
            const float2 pair = *reinterpret_cast<const float2*>(from + 8 * g);
            bias[4 * g + 2 * r] = __float_as_uint(pair.x);
            bias[4 * g + 2 * r + 1] = __float_as_uint(pair.y);
          }
        } else {
          const uint16_t* from = static_cast<const uint16_t*>(view.data) + at + 8 * quad;
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const uint4 eight = *reinterpret_cast<const uint4*>(from + 32 * half);
            uint32_t* to = bias + (2 * r + half) * 4;
            to[0] = eight.x, to[1] = eight.y, to[2] = eight.z, to[3] = eight.w;
          }
        }
      }
    }

    // S = c S + bias - lse2, in units of log2.
    __device__ __forceinline__ void add_bias(uint32_t (&bias)[kElements], const float (&lse2)[2],
                                             float (&S)[kElements]) const {
      const Params& p = a.problem;
      const float c = logit_scale<Element>(p);
      const float factor = p.flags & TESSERA_BIAS_PRE_SCALE ? c : kLog2e;
      if (p.tensor[TESSERA_BIAS].dtype == TESSERA_FP32) {
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
          S[e] = fmaf(S[e], c, fmaf(__uint_as_float(bias[e]), factor, -lse2[e / 2 % 2]));
        }
        return;
      }
#pragma unroll
      for (int part = 0; part < 4; ++part) {  // row part / 2, groups 4 (part % 2) and on
        uint32_t x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = bias[4 * part + i];
        transpose_quad(x, lane % 4);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float* s = S + 4 * (4 * (part % 2) + i) + 2 * (part / 2);
          const float base = -lse2[part / 2];
          s[0] = fmaf(s[0], c, fmaf(low_element<Element>(x[i]), factor, base));
          s[1] = fmaf(s[1], c, fmaf(high_element<Element>(x[i]), factor, base));
        }
      }
    }

    // Raw scores and dP to the gradient, with everything that can shape a score.
    __device__ __forceinline__ void shaped_gradient(const Block& at, int row,
                                                    const float (&lse2)[2], const float (&delta)[2],
                                                    float (&S)[kElements],
                                                    float (&dP)[kElements]) const {
      constexpr auto kRows = cuda::Major::kQueries;
      const Params& p = a.problem;
      const bool sloped =
          (p.flags & TESSERA_SOFTCAP) && (p.flags & TESSERA_BIAS_PRE_SCALE) && !a.of_slopes;
      const int query0 = at.block * kTileM;
      float cap_slope[kElements];
      shape_scores<Element, kKeys, kRows>(S, &cap_slope, p, at.visit.sequence,
                                          TileRows{query0, at.head, 1}, row, at.key0, true);
      uint32_t kept[1] = {~0u};
      if (p.flags & TESSERA_DROPOUT) {
        dropout_bits<kKeys, kRows>(dropout_of(p), head_index_of(p, at.n, at.head), query0 + row,
                                   at.key0, kept);
      }
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        const int r = e / 2 % 2;
        const float gradient = kept[0] >> e & 1 ? dP[e] : 0.f;  // dropout's scale is in lse2
        const float dx = exp2_approx(S[e] - lse2[r]) * (gradient - delta[r]);
        S[e] = S[e] == -kInfinity ? 0.f : sloped ? dx * cap_slope[e] : dx;
      }
    }

    // Zeros where the band or a length hides the key: what stands there may be anything.
    __device__ __forceinline__ void mask(const Block& at, int query, float (&S)[kElements]) const {
      const int column = at.key0 + 2 * (lane % 4);  // of element 0
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const Interval keys = at.visit.sequence.band.row(query + 8 * r);
        const uint32_t visible = element_bits(keys.lo - column, keys.hi - column);
#pragma unroll
        for (int e = 0; e < kKeys / 4; ++e) {
          float& s = S[4 * (e / 2) + 2 * r + e % 2];
          s = visible >> e & 1 ? s : 0.f;
        }
      }
    }

    // What a slope multiplies: minus the distance from the diagonal.
    __device__ __forceinline__ void softmax_by_distance(const Block& at, int query,
                                                        float (&S)[kElements]) const {
      const int under = query + at.visit.sequence.band.shift;
      const float distance0 = static_cast<float>(under - (at.key0 + 2 * (lane % 4)));
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        S[e] *= -fabsf(distance0 + static_cast<float>(8 * (e / 2 % 2) - (8 * (e / 4) + e % 2)));
      }
    }

    // ---- a sum is complete ----

    // Finishes a block of queries and the tile of keys at key0; n, head: of the bias.
    __device__ __forceinline__ void finish(int block, int key0, int n, int head, int term,
                                           float (&sum)[kElements]) const {
      if (!kPlain && (a.cut.extent[2] == 1 || a.cut.extent[3] == 1)) {
        store_partial(block, key0, n, head, term, sum);
        return;
      }
      const View& out = a.out;
      const int64_t base = offset_of(out, n, head);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int query = block * kTileM + thread / kWarp * 16 + lane / 4 + 8 * r;
        store_block(out, base + query * out.stride[2], query < a.cut.extent[2], key0 + w * kKeys, r,
                    a.factor, sum);
      }
    }

    // Row r of the block to a row of dbias.
    __device__ __forceinline__ void store_block(const View& out, int64_t row, bool stored, int key0,
                                                int r, float factor,
                                                const float (&sum)[kElements]) const {
      const int quad = lane % 4, keys = a.cut.extent[3];
      if (out.dtype != TESSERA_FP32 && out.vector_bytes == 16 && out.stride[3] == 1) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          uint32_t x[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float* pair = sum + 4 * (4 * half + i) + 2 * r;
            x[i] = pack<Element>(pair[0] * factor, pair[1] * factor);
          }
          transpose_quad(x, quad);
          const int key = key0 + 8 * (4 * half + quad);
          auto* to = static_cast<uint16_t*>(out.data) + row + key;
          if (stored && key + 8 <= keys) {
            *reinterpret_cast<uint4*>(to) = uint4{x[0], x[1], x[2], x[3]};
          } else if (stored) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
              if (key + i < keys) to[i] = static_cast<uint16_t>(x[i / 2] >> (i % 2 * 16));
            }
          }
        }
        return;
      }
#pragma unroll
      for (int e = 0; e < kKeys / 4; ++e) {
        const int key = key0 + 8 * (e / 2) + 2 * quad + e % 2;
        if (stored && key < keys) {
          store_float(out.data, row + key * out.stride[3], out.dtype,
                      sum[4 * (e / 2) + 2 * r + e % 2] * factor);
        }
      }
    }

    // One query or one key for all: the sums over the warp's rows, or over the warpgroup's keys, or
    // both, as terms for dbias_sum.
    __device__ __forceinline__ void store_partial(int block, int key0, int n, int head,
                                                  int item_term, float (&sum)[kElements]) const {
      const int queries = a.cut.extent[2], keys = a.cut.extent[3], quad = lane % 4;
      const bool one_query = queries == 1, one_key = keys == 1;
      if (one_key) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float total = 0;
#pragma unroll
          for (int e = 0; e < kKeys / 4; ++e) total += sum[4 * (e / 2) + 2 * r + e % 2];
          total += __shfl_xor_sync(kAllLanes, total, 1);
          total += __shfl_xor_sync(kAllLanes, total, 2);
          sum[2 * r] = total;
        }
      }
      const int warp = thread / kWarp;
      const int64_t term = (int64_t{item_term} * (one_query ? 4 : 1) + (one_query ? warp : 0)) *
                               (one_key ? kConsumers : 1) +
                           (one_key ? w : 0);
      const int64_t bias_row = int64_t{n} * a.cut.extent[1] + head;
      float* to = a.partial + (term * a.cut.bias_rows + bias_row) * queries * keys;
      if (!one_query) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int query = block * kTileM + warp * 16 + lane / 4 + 8 * r;
          if (quad == 0 && query < queries) to[query] = sum[2 * r] * a.factor;
        }
        return;
      }
#pragma unroll
      for (int i = 0; i < kKeys / 4; ++i) {
        const int e = 4 * (i / 2) + i % 2;
        const int key = one_key ? 8 * (i / 2) + 2 * quad + i % 2
                                : key0 + w * kKeys + 8 * (i / 2) + 2 * quad + i % 2;
        float total = sum[e] + sum[e + 2];
#pragma unroll
        for (int bit = 4; bit < kWarp; bit *= 2) total += __shfl_xor_sync(kAllLanes, total, bit);
        if (lane < 4 && key < keys) to[key] = total * a.factor;
      }
    }
  };
};

template <typename Element, typename Row>
__global__ void __launch_bounds__(DbiasTile::kThreads, 1)
    dbias(const __grid_constant__ DbiasParams a) {
  using Kernel = Dbias<Element, Row>;
  using Storage = typename Kernel::SharedStorage;
  extern __shared__ __align__(1024) uint8_t storage[];
  const typename Kernel::Shared shared{static_cast<uint32_t>(__cvta_generic_to_shared(storage))};
  const int warpgroup = uniform(threadIdx.x / kWarpgroup);
  if (threadIdx.x == 0) {
    for (const CUtensorMap* map : {&a.q, &a.k, &a.v, &a.grad_o}) tma_prefetch(map);
    shared.kv_barriers().init(Kernel::kWarps);
    shared.q_barriers().init(Kernel::kWarps);
    shared.command_barriers().init(Kernel::kWarps);
    mbarrier_init_fence();
  }
  __syncthreads();
  wait_for_predecessors();
  launch_dependents();
  Storage& in_shared = *reinterpret_cast<Storage*>(storage);
  if (warpgroup == 0) {
    registers_release<Kernel::kProducerRegisters>();
    if (threadIdx.x == 0) DbiasProducer<Kernel>(a, shared, in_shared).run();
  } else {
    registers_claim<Kernel::kConsumerRegisters>();
    const int thread = threadIdx.x % kWarpgroup;
    typename Kernel::Consumer{a,  shared, in_shared.visits, warpgroup - 1, thread, thread % kWarp,
                              {}, {}}
        .run();
  }
}

template <typename Element, typename Row>
DbiasCode make_dbias() {
  return {static_cast<int>(sizeof(typename Dbias<Element, Row>::SharedStorage)),
          reinterpret_cast<const void*>(&dbias<Element, Row>)};
}

}  // namespace tessera::cuda::sm90
