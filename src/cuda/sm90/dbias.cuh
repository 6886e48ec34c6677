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
// A slot holds a visit: a tile of keys of one head of one sequence. The producer writes down what
// it is, which is all that the warpgroups need to know of lengths and layout.
//
//   barrier         arrivals             says
//   kv.full[s]      1 + bytes            a visit is written down; K and V have arrived
//   kv.empty[s]     8 (a warp each)      the warpgroups are done with it
//   q.full[s]       1 + bytes            a block of Q and dO and its statistics have arrived
//   q.empty[s]      8                    both have used it
#pragma once

#include <cstddef>

#include "cuda/common/score.cuh"
#include "cuda/sm90/backward_edges.cuh"
#include "cuda/sm90/dbias_kernels.h"
#include "cuda/sm90/dbias_walk.cuh"
#include "cuda/sm90/fragment.cuh"
#include "cuda/sm90/pipeline.cuh"
#include "cuda/sm90/ptx.cuh"
#include "cuda/sm90/smem_tile.cuh"
#include "cuda/sm90/tensormap.h"
#include "cuda/sm90/wgmma.cuh"

namespace tessera::cuda::sm90 {

template <typename Element, typename Row>
struct Dbias {
  static constexpr DbiasTile kTile = Row::kTile;
  static constexpr int kTileM = DbiasTile::kTileM, kTileN = DbiasTile::kTileN, kKeys = 64;
  static constexpr int kConsumers = DbiasTile::kConsumers, kWarps = 4 * kConsumers;
  static constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;
  static constexpr int kElements = kKeys / 2;  // of a thread

  using QTile = SmemTile<kTileM, kTile.dqk>;
  using GradOTile = SmemTile<kTileM, kTile.dv>;
  using KTile = SmemTile<kTileN, kTile.dqk>;
  using VTile = SmemTile<kTileN, kTile.dv>;

  struct alignas(1024) SharedStorage {
    uint8_t k[kTile.kv_slots][KTile::kBytes], v[kTile.kv_slots][VTile::kBytes];
    uint8_t q[kTile.q_stages][QTile::kBytes], grad_o[kTile.q_stages][GradOTile::kBytes];
    float lse2[kTile.q_stages][kTileM], delta[kTile.q_stages][kTileM];
    Visit visits[kTile.kv_slots];
    uint64_t kv_barriers[2 * kTile.kv_slots], q_barriers[2 * kTile.q_stages];
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
  };

  // ---- producer: one thread ----

  struct Producer {
    const DbiasParams& a;
    const Shared shared;
    Visit* visits;
    Ring<kTile.kv_slots> ring;
    Ring<kTile.q_stages> q_ring;

    static __device__ __forceinline__ int uniform(int x) { return x; }
    // A visit of the blocks [block, block_end) of queries.
    __device__ __forceinline__ int open(int n, int head, int tile, int block, int block_end) {
      const int slot = ring.stage, key0 = tile * kTileN;
      const auto barriers = shared.kv_barriers();
      mbarrier_wait(barriers.empty(slot), ring.phase ^ 1);
      Visit& visit = visits[slot];
      const Sequence sequence = sequence_of(a.problem, n);
      const Interval queries = sequence.band.rows(key0, key0 + kTileN);
      visit.sequence = sequence;
      visit.head = head;
      visit.key0 = key0;
      visit.begin = max(block, static_cast<int>(queries.lo) / kTileM);
      visit.end = queries.empty()
                      ? 0
                      : min(block_end, (static_cast<int>(queries.hi) + kTileM - 1) / kTileM);
      const uint32_t full = barriers.full(slot);
      if (visit.begin < visit.end) {
        mbarrier_arrive_expect(full, KTile::kBytes + VTile::kBytes);
        const int kv_head = head / a.problem.group;
        const MapRow row = map_row(a.ragged_k, sequence.k, key0);
        KTile::load(shared.k(slot), &a.k, full, kv_head, row.c2, row.c3, sequence.k.batch);
        VTile::load(shared.v(slot), &a.v, full, kv_head, row.c2, row.c3, sequence.k.batch);
      } else {
        mbarrier_arrive(full);
      }
      ring.advance();
      return slot;
    }
    __device__ __forceinline__ void close() {}
    __device__ __forceinline__ void clear() {}
    __device__ __forceinline__ void finish(const DbiasItem&, int) {}

    __device__ __forceinline__ void step(const Visit& visit, int, int block) {
      constexpr int kRowBytes = kTileM * 4;
      const Params& p = a.problem;
      const Rows& rows = visit.sequence.q;
      const int stage = q_ring.stage, query0 = block * kTileM;
      const int first_slot = first_slot_of(p.thd_q, visit.sequence.n, rows.first, a.tile_m,
                                           (p.sq + a.tile_m - 1) / a.tile_m);
      const int64_t at = (int64_t{visit.head} * a.slots + first_slot) * a.tile_m + query0;
      const auto barriers = shared.q_barriers();
      barriers.acquire(q_ring, QTile::kBytes + GradOTile::kBytes + 2 * kRowBytes);
      const uint32_t full = barriers.full(stage);
      const MapRow row = map_row(a.ragged_q, rows, query0);
      QTile::load(shared.q(stage), &a.q, full, visit.head, row.c2, row.c3, rows.batch);
      GradOTile::load(shared.grad_o(stage), &a.grad_o, full, visit.head, row.c2, row.c3,
                      rows.batch);
      bulk_load(shared.lse2(stage), a.lse2 + at, kRowBytes, full);
      bulk_load(shared.delta(stage), a.delta + at, kRowBytes, full);
      q_ring.advance();
    }
  };

  // ---- consumer: 64 keys ----

  struct Consumer {
    const DbiasParams& a;
    const Shared shared;
    const Visit* visits;
    const int w, thread, lane;
    Ring<kTile.kv_slots> ring, closing;
    Ring<kTile.q_stages> q_ring;
    float sum[kElements];

    static __device__ __forceinline__ int uniform(int x) { return uniform_register(x); }
    __device__ __forceinline__ int open(int, int, int, int, int) {
      const int slot = ring.stage;
      shared.kv_barriers().wait(ring);
      ring.advance();
      return slot;
    }
    __device__ __forceinline__ void close() {
      __syncwarp();
      if (lane == 0) shared.kv_barriers().release(closing);
      closing.advance();
    }
    __device__ __forceinline__ void clear() {
#pragma unroll
      for (float& x : sum) x = 0;
    }

    __device__ __forceinline__ void step(const Visit& visit, int slot, int block) {
      float S[kElements], dP[kElements];
      const int stage = q_ring.stage;
      const uint32_t rows_before = w * kKeys * kChunkRowBytes;
      const uint64_t k = KTile::k_major(shared.k(slot) + rows_before),
                     v = VTile::k_major(shared.v(slot) + rows_before);
      shared.q_barriers().wait(q_ring);
      const uint64_t q = QTile::k_major(shared.q(stage)),
                     grad_o = GradOTile::k_major(shared.grad_o(stage));
      pin(S);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kTile.dqk / kStepK; ++i) {
        Wgmma<Element, kKeys>::template ss<kMajorK, kMajorK>(S, q + QTile::k_major_step(i),
                                                             k + KTile::k_major_step(i), i > 0);
      }
      wgmma_commit();
      pin(dP);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kTile.dv / kStepK; ++i) {
        Wgmma<Element, kKeys>::template ss<kMajorK, kMajorK>(
            dP, grad_o + GradOTile::k_major_step(i), v + VTile::k_major_step(i), i > 0);
      }
      wgmma_commit();

      const int row = thread / kWarp * 16;                // of the warp, in the block
      const int query = block * kTileM + row + lane / 4;  // and + 8
      const int key0 = visit.key0 + w * kKeys;
      const KeyInterval of_all =
          keys_of_all_rows(visit.sequence.band, block * kTileM, (block + 1) * kTileM);
      const bool clean = uniform(of_all.lo <= key0 && key0 + kKeys <= of_all.hi);
      const uint32_t lse2_row = shared.lse2(stage) + (row + lane / 4) * 4,
                     delta_row = shared.delta(stage) + (row + lane / 4) * 4;
      const float lse2[2] = {load_shared(lse2_row), load_shared(lse2_row + 32)};
      const float delta[2] = {load_shared(delta_row), load_shared(delta_row + 32)};
      const bool plain = a.plain && key0 + kKeys <= a.cut.extent[3];
      uint32_t bias[kElements];
      if (plain) load_bias(visit, query, key0, bias);
      wgmma_wait<1>();
      pin(S);
      if (plain) {
        add_bias(bias, lse2, S);
#pragma unroll
        for (float& s : S) s = exp2_approx(s);
        wgmma_wait<0>();
        pin(dP);
#pragma unroll
        for (int e = 0; e < kElements; ++e) S[e] *= dP[e] - delta[e / 2 % 2];
      } else {
        wgmma_wait<0>();
        pin(dP);
        shaped_gradient(visit, block * kTileM, row, key0, lse2, delta, S, dP);
      }
      __syncwarp();
      if (lane == 0) shared.q_barriers().release(q_ring);
      q_ring.advance();
      if (!clean) hide(visit, query, key0, S);
      if (a.of_slopes) weigh(visit, query, key0, S);
#pragma unroll
      for (int e = 0; e < kElements; ++e) sum[e] += S[e];
    }

    // The bias of a whole block, from rows of 16-bit elements by 16 bytes, which the four threads
    // of a quad trade later, or from rows of fp32.
    __device__ __forceinline__ void load_bias(const Visit& visit, int my_query, int key0,
                                              uint32_t (&bias)[kElements]) const {
      const View& view = a.problem.tensor[TESSERA_BIAS];
      const int quad = lane % 4;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int query = existing(my_query + 8 * r, visit.sequence.q.length);
        const int64_t at = offset_of(view, visit.sequence.n, visit.head, query, key0);
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
          const float2 pair = unpack(x[i]);
          s[0] = fmaf(s[0], c, fmaf(pair.x, factor, base));
          s[1] = fmaf(s[1], c, fmaf(pair.y, factor, base));
        }
      }
    }
    static __device__ __forceinline__ float2 unpack(uint32_t x) {
      if constexpr (sizeof(Element) == 2 && std::is_same_v<Element, __nv_bfloat16>) {
        return {__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)};
      } else {
        return __half22float2(*reinterpret_cast<const __half2*>(&x));
      }
    }

    // Raw scores and dP to the gradient, with everything that can shape a score.
    __device__ __forceinline__ void shaped_gradient(const Visit& visit, int query0, int row,
                                                    int key0, const float (&lse2)[2],
                                                    const float (&delta)[2], float (&S)[kElements],
                                                    float (&dP)[kElements]) const {
      constexpr auto kRows = cuda::Major::kQueries;
      const Params& p = a.problem;
      const bool sloped =
          (p.flags & TESSERA_SOFTCAP) && (p.flags & TESSERA_BIAS_PRE_SCALE) && !a.of_slopes;
      float cap_slope[kElements];
      shape_scores<Element, kKeys, kRows>(S, &cap_slope, p, visit.sequence,
                                          TileRows{query0, visit.head, 1}, row, key0, true);
      uint32_t kept[1] = {~0u};
      if (p.flags & TESSERA_DROPOUT) {
        dropout_bits<kKeys, kRows>(dropout_of(p),
                                   static_cast<uint32_t>(visit.sequence.n) * p.hq + visit.head,
                                   query0 + row, key0, kept);
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
    __device__ __forceinline__ void hide(const Visit& visit, int query, int key0,
                                         float (&S)[kElements]) const {
      const int column = key0 + 2 * (lane % 4);  // of element 0
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const KeyInterval keys = keys_of_row(visit.sequence.band, query + 8 * r);
        const uint32_t visible = element_bits(keys.lo - column, keys.hi - column);
#pragma unroll
        for (int e = 0; e < kKeys / 4; ++e) {
          float& s = S[4 * (e / 2) + 2 * r + e % 2];
          s = visible >> e & 1 ? s : 0.f;
        }
      }
    }

    // What a slope multiplies: minus the distance from the diagonal.
    __device__ __forceinline__ void weigh(const Visit& visit, int query, int key0,
                                          float (&S)[kElements]) const {
      const int under = query + static_cast<int>(visit.sequence.band.shift);
      const float distance0 = static_cast<float>(under - (key0 + 2 * (lane % 4)));
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        S[e] *= -fabsf(distance0 + static_cast<float>(8 * (e / 2 % 2) - (8 * (e / 4) + e % 2)));
      }
    }

    // ---- a sum is complete ----

    __device__ __forceinline__ void finish(const DbiasItem& item, int block) {
      if (a.cut.extent[2] == 1 || a.cut.extent[3] == 1) {
        store_partial(item, block);
        return;
      }
      const View& out = a.out;
      const int64_t base = offset_of(out, item.bias_n, item.bias_head);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int query = block * kTileM + thread / kWarp * 16 + lane / 4 + 8 * r;
        store_block(out, base + query * out.stride[2], query < a.cut.extent[2],
                    item.tile * kTileN + w * kKeys, r, a.factor);
      }
    }

    // Row r of the block to a row of dbias.
    __device__ __forceinline__ void store_block(const View& out, int64_t row, bool stored, int key0,
                                                int r, float factor) const {
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
    __device__ __forceinline__ void store_partial(const DbiasItem& item, int block) {
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
      const int64_t term = (int64_t{item.term} * (one_query ? 4 : 1) + (one_query ? warp : 0)) *
                               (one_key ? kConsumers : 1) +
                           (one_key ? w : 0);
      const int64_t bias_row = int64_t{item.bias_n} * a.cut.extent[1] + item.bias_head;
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
                                : item.tile * kTileN + w * kKeys + 8 * (i / 2) + 2 * quad + i % 2;
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
    mbarrier_init_fence();
  }
  __syncthreads();
  wait_for_predecessors();
  launch_dependents();
  Visit* visits = reinterpret_cast<Storage*>(storage)->visits;
  if (warpgroup == 0) {
    registers_release<Kernel::kProducerRegisters>();
    if (threadIdx.x == 0) {
      typename Kernel::Producer producer{a, shared, visits, {}, {}};
      walk<Kernel::kTile.kv_slots>(a.cut, producer);
    }
  } else {
    registers_claim<Kernel::kConsumerRegisters>();
    const int thread = threadIdx.x % kWarpgroup;
    typename Kernel::Consumer consumer{
        a, shared, visits, warpgroup - 1, thread, thread % kWarp, {}, {}, {}, {}};
    walk<Kernel::kTile.kv_slots>(a.cut, consumer);
  }
}

template <typename Element, typename Row>
DbiasKernel make_dbias(int dtype) {
  return {dtype, Row::kTile, static_cast<int>(sizeof(typename Dbias<Element, Row>::SharedStorage)),
          reinterpret_cast<const void*>(&dbias<Element, Row>)};
}

}  // namespace tessera::cuda::sm90
