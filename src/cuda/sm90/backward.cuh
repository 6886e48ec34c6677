// SPDX-License-Identifier: Apache-2.0
// Attention backward on Hopper: dQ, dK and dV in one pass over the scores, five products.
//
//   S^T = K Q^T       dP^T = V dO^T       P^T = exp2(c S^T - lse2)       dS^T = P^T (dP^T - delta)
//   dV += P^T dO      dK += dS^T Q        dQ = sum over tiles of dS K
//
// Everything is transposed, so that a thread's P and dS are the A operands of dV and dK as they lie
// in registers. A CTA owns tile_n = 128 keys of one key head and walks the blocks of tile_m queries
// that see them, for every query head of the group: dK and dV stay in registers, GQA needs no
// second sum.
//
//   warpgroup 0     producer  one thread: Q, lse2, dO, delta of each block by TMA
//   warpgroup 1, 2  owners    S, dP -> P, dS -> dV, dK of 64 keys each, and half of dQ
//
// dQ needs the dS of both owners, through shared memory, and is made one block late: an owner
// computes the dQ of block i - 1 together with its dV and dK of block i. So the owners hardly wait
// for each other, and while one computes exponentials the products of the other keep the tensor
// cores busy. dQ is added to fp32 sums in global memory while dV and dK run.
//
//   barrier        arrivals          says
//   kv             1 + bytes         K and V have arrived
//   q, grad_o [s]  1 + bytes         a block and its lse2 (delta) have arrived
//   ds.full[b]     8 (a warp each)   both owners have written their rows of dS(i), and so are done
//                                    with block i - 1: its stage takes block i + 2
//   ds.empty[b]    8                 both have used them
#pragma once

#include <cstddef>

#include "cuda/common/element.cuh"
#include "cuda/sm90/backward_blocks.cuh"
#include "cuda/sm90/backward_dbias.cuh"
#include "cuda/sm90/backward_edges.cuh"
#include "cuda/sm90/backward_features.cuh"
#include "cuda/sm90/backward_kernels.h"
#include "cuda/sm90/backward_schedule.cuh"
#include "cuda/sm90/backward_turns.cuh"
#include "cuda/sm90/fragment.cuh"
#include "cuda/sm90/output.cuh"
#include "cuda/sm90/pipeline.cuh"
#include "cuda/sm90/ptx.cuh"
#include "cuda/sm90/smem_tile.cuh"
#include "cuda/sm90/wgmma.cuh"

namespace tessera::cuda::sm90 {

// Row: one row of the table in backward_tiles.def, as a type with the constants kTile and
// kFeatures.
template <typename Element, typename Row>
struct Backward {
  static constexpr BackwardTile kTile = Row::kTile;
  static constexpr int kFeatures = Row::kFeatures;
  static constexpr bool kRich = kFeatures & kEverything, kLeavesOut = kFeatures & kMasks;
  static constexpr int kTileM = kTile.tile_m, kTileN = kTile.tile_n(), kStages = 3;
  static constexpr int kOwners = BackwardTile::kOwners, kOwnerWarps = 4 * kOwners;
  static constexpr int kGradientBuffers = kTile.ds_buffers;
  // What the roles claim is what the CTA was launched with: 3 x 168 registers.
  static constexpr int kProducerRegisters = 24, kOwnerRegisters = 240;
  // An owner makes 64 queries x 64 or 32 columns of a block of dQ: half of its rows or half of its
  // columns. Element 4 i + j of a thread's accumulators lies at 4 (128 i + thread) + j of its part:
  // warps add whole lines.
  static constexpr bool kSplitsRows = kTileM == 128;
  static constexpr int kColumnsOfDq = kTile.columns_of_dq(), kPartsOfDq = kTile.parts_of_dq();
  static constexpr int kPartOfDq = 64 * kColumnsOfDq, kBlockOfDq = kTile.sums_of_dq();

  using Schedule = KeySchedule<kTileM, kTileN>;
  using QTile = SmemTile<kTileM, kTile.dqk>;
  using GradOTile = SmemTile<kTileM, kTile.dv>;
  using KTile = SmemTile<kTileN, kTile.dqk>;
  using VTile = SmemTile<kTileN, kTile.dv>;
  using GradientTile = SmemTile<kTileN, kTileM>;  // dS^T
  using Blocks = QueryBlocks<kTileM, kTileN>;
  using Features = BackwardFeatures<Element, kTileM, kFeatures>;
  using Order = Turns<kTileM, kTileN, kOwnerWarps, kLeavesOut>;

  // What a row does not do costs nothing.
  struct Nothing {
    template <typename... Args>
    __device__ __forceinline__ explicit Nothing(const Args&...) {}
  };
  using BiasSums = std::conditional_t<kSumsBias<Row>, BiasGradient<Element>, Nothing>;
  static_assert(!Features::kFetchesBias || kGradientBuffers == 3);
  static_assert(!kSumsBias<Row> || kTileM == 64);

  struct alignas(1024) SharedStorage {
    uint8_t k[KTile::kBytes], v[VTile::kBytes];
    uint8_t q[kStages][QTile::kBytes];
    uint8_t grad_o[kStages][GradOTile::kBytes];
    uint8_t ds[kGradientBuffers][GradientTile::kBytes];
    uint8_t bias_sums[kSumsBias<Row> ? kOwners : 1][kSumsBias<Row> ? 64 * kTileM * 2 : 16];
    float lse2[kStages][kTileM], delta[kStages][kTileM];
    uint64_t kv_barrier, q_barriers[kStages], grad_o_barriers[kStages];
    uint64_t ds_barriers[2 * kGradientBuffers];
    uint64_t turn_barriers[Order::kBarriers];  // deterministic: see backward_turns.cuh
    int turn_stored[Order::kRing];
    int2 blocks[kStages];  // rich: which block a stage holds, see Stage
    KeyTile tile;
  };
  static_assert(sizeof(SharedStorage) <= 227 * 1024);
  static_assert(kSplitsRows ? kTile.dqk == 64 : kTileM == 64 && kTile.dqk <= 128);
  static_assert(kTile.dqk % 32 == 0 && kTile.dv % 32 == 0);

  struct Shared {
    uint32_t base;

    __device__ __forceinline__ uint32_t k() const { return base + offsetof(SharedStorage, k); }
    __device__ __forceinline__ uint32_t v() const { return base + offsetof(SharedStorage, v); }
    __device__ __forceinline__ uint32_t q(int stage) const {
      return base + offsetof(SharedStorage, q) + stage * QTile::kBytes;
    }
    __device__ __forceinline__ uint32_t grad_o(int stage) const {
      return base + offsetof(SharedStorage, grad_o) + stage * GradOTile::kBytes;
    }
    __device__ __forceinline__ uint32_t ds(int buffer) const {
      return base + offsetof(SharedStorage, ds) + buffer * GradientTile::kBytes;
    }
    __device__ __forceinline__ uint32_t bias_sums(int owner) const {
      return base + offsetof(SharedStorage, bias_sums) + owner * 64 * kTileM * 2;
    }
    __device__ __forceinline__ uint32_t lse2(int stage) const {
      return base + offsetof(SharedStorage, lse2) + stage * kTileM * 4;
    }
    __device__ __forceinline__ uint32_t delta(int stage) const {
      return base + offsetof(SharedStorage, delta) + stage * kTileM * 4;
    }
    __device__ __forceinline__ uint32_t block(int stage) const {
      return base + offsetof(SharedStorage, blocks) + 8 * stage;
    }
    __device__ __forceinline__ uint32_t kv_barrier() const {
      return base + offsetof(SharedStorage, kv_barrier);
    }
    __device__ __forceinline__ uint32_t q_barrier(int stage) const {
      return base + offsetof(SharedStorage, q_barriers) + 8 * stage;
    }
    __device__ __forceinline__ uint32_t grad_o_barrier(int stage) const {
      return base + offsetof(SharedStorage, grad_o_barriers) + 8 * stage;
    }
    __device__ __forceinline__ StageBarriers<kGradientBuffers> ds_barriers() const {
      return {base + uint32_t(offsetof(SharedStorage, ds_barriers))};
    }
    __device__ __forceinline__ Order turns() const {
      return Order(base + uint32_t(offsetof(SharedStorage, turn_barriers)),
                   base + uint32_t(offsetof(SharedStorage, turn_stored)));
    }

    // By one thread.
    __device__ __forceinline__ void init() const {
      mbarrier_init(kv_barrier(), 1);
      for (int stage = 0; stage < kStages; ++stage) {
        mbarrier_init(q_barrier(stage), 1);
        mbarrier_init(grad_o_barrier(stage), 1);
      }
      for (int buffer = 0; buffer < kGradientBuffers; ++buffer) {
        mbarrier_init(ds_barriers().full(buffer), kOwnerWarps);
        mbarrier_init(ds_barriers().empty(buffer), kOwnerWarps);
      }
      if constexpr (kInTurn<Row>) turns().init();
      mbarrier_init_fence();
    }
    // The same again, when nothing is under way.
    __device__ __forceinline__ void init_again() const {
      constexpr int kBarriers =
          (offsetof(SharedStorage, turn_stored) - offsetof(SharedStorage, kv_barrier)) / 8;
      for (int i = 0; i < kBarriers; ++i) {
        if (kInTurn<Row> || i < kBarriers - Order::kBarriers) {
          mbarrier_invalidate(kv_barrier() + 8 * i);
        }
      }
      init();
    }
  };

  // ---- producer ----

  // What the rich producer says of a stage, as two integers: the query head of the group, or -1
  // when there are no more blocks, and twice the block, plus 1 where some key is hidden from some
  // query.
  struct Stage {
    int member, block_and_masked;
  };

  // By one thread: the stages of Q, lse2, dO and delta, in turn.
  class Loader {
   public:
    __device__ __forceinline__ Loader(const BackwardParams& a, const KeyTile& tile,
                                      const Shared shared)
        : a_(a), tile_(tile), shared_(shared), row0_(map_row(a.ragged_q, tile.q, 0)) {}

    __device__ __forceinline__ void load_keys() const {
      const MapRow key = map_row(a_.ragged_k, tile_.k, tile_.key0);
      const uint32_t barrier = shared_.kv_barrier();
      mbarrier_arrive_expect(barrier, KTile::kBytes + VTile::kBytes);
      KTile::load(shared_.k(), &a_.k, barrier, tile_.kv_head, key.c2, key.c3, tile_.k.batch);
      VTile::load(shared_.v(), &a_.v, barrier, tile_.kv_head, key.c2, key.c3, tile_.k.batch);
    }
    __device__ __forceinline__ void load_block(int member, int block, bool masked) {
      acquire();
      const int head = tile_.kv_head * a_.problem.group + member;
      const int64_t row = (int64_t{head} * a_.slots + tile_.first_slot + block) * kTileM;
      const int c2 = row0_.c2 + block * kTileM, batch = tile_.q.batch;
      const uint32_t q = shared_.q_barrier(ring_.stage),
                     grad_o = shared_.grad_o_barrier(ring_.stage);
      if constexpr (kRich) say({member, 2 * block + masked});
      mbarrier_arrive_expect(q, QTile::kBytes + kTileM * 4);
      QTile::load(shared_.q(ring_.stage), &a_.q, q, head, c2, row0_.c3, batch);
      bulk_load(shared_.lse2(ring_.stage), a_.lse2 + row, kTileM * 4, q);
      mbarrier_arrive_expect(grad_o, GradOTile::kBytes + kTileM * 4);
      GradOTile::load(shared_.grad_o(ring_.stage), &a_.grad_o, grad_o, head, c2, row0_.c3, batch);
      bulk_load(shared_.delta(ring_.stage), a_.delta + row, kTileM * 4, grad_o);
      ring_.advance();
    }
    __device__ __forceinline__ void say_last() {
      acquire();
      say({-1, 0});
      mbarrier_arrive(shared_.q_barrier(ring_.stage));
    }

   private:
    // Block i is asked for when both owners have dS(i - 2).
    __device__ __forceinline__ void acquire() {
      if (++asked_ <= 2) return;
      shared_.ds_barriers().wait(ds_ring_);
      ds_ring_.advance();
    }
    __device__ __forceinline__ void say(Stage stage) const {
      asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(shared_.block(ring_.stage)),
                   "r"(stage.member), "r"(stage.block_and_masked)
                   : "memory");
    }

    const BackwardParams& a_;
    const KeyTile& tile_;
    const Shared shared_;
    const MapRow row0_;
    Ring<kStages> ring_;
    Ring<kGradientBuffers> ds_ring_;
    int asked_ = 0;
  };

  // By one thread, or by one warp where blocks are left out. lse2, delta and zeros in the sums are
  // the kernel's before, which is waited for also without work: the next kernel waits for this one
  // alone.
  static __device__ __forceinline__ void producer(const BackwardParams& a, const KeyTile& tile,
                                                  const Shared shared) {
    Loader loader(a, tile, shared);
    const int group = a.problem.group;
    const int2 walk = walk_of<Row, Order>(tile);
    const bool leader = threadIdx.x == 0;
    if (leader && tile.begin < tile.end) loader.load_keys();
    wait_for_predecessors();
    if constexpr (kLeavesOut) {
      const Blocks blocks(a, tile);
#pragma unroll 1
      for (int member = 0; member < group; ++member) {
#pragma unroll 1
        for (int start = tile.begin; start < tile.end; start += kWarp) {
          const auto bits = blocks.look(tile.kv_head * group + member, start);
          if (!leader) continue;
#pragma unroll 1
          for (uint32_t live = bits.live; live; live &= live - 1) {
            const int i = __ffs(live) - 1;
            loader.load_block(member, start + i, bits.partial >> i & 1);
          }
        }
      }
      if (leader) loader.say_last();
    } else {
#pragma unroll 1
      for (int member = 0; member < group; ++member) {
#pragma unroll 1
        for (int i = tile.begin, block = walk.x; i < tile.end; ++i, block += walk.y) {
          loader.load_block(member, block, block < tile.clean_begin || block >= tile.clean_end);
        }
      }
      if constexpr (kRich) loader.say_last();
    }
  }

  // ---- owner: dK and dV of 64 keys ----

  static __device__ __forceinline__ void owner(const BackwardParams& a, const KeyTile& tile,
                                               const Shared shared, const int w) {
    const Params& p = a.problem;
    const int thread = threadIdx.x % kWarpgroup, lane = thread % kWarp, quad = lane % 4;
    const int warp_row = w * 64 + thread / kWarp * 16;  // of the tile
    const int key = tile.key0 + warp_row + lane / 4;    // and key + 8
    const auto ds_barriers = shared.ds_barriers();
    const int begin = uniform_register(tile.begin), end = uniform_register(tile.end);
    const int walk_first = uniform_register(walk_of<Row, Order>(tile).x),
              walk_step = kInTurn<Row> ? uniform_register(walk_of<Row, Order>(tile).y) : 1;
    const int clean_begin = uniform_register(tile.clean_begin),
              clean_end = uniform_register(tile.clean_end);
    const uint32_t ds_row = GradientTile::unit(0, warp_row + lane % 16, lane / 16);
    const float c = log2_scale(p);
    const uint64_t k = KTile::k_major(shared.k() + w * 64 * kChunkRowBytes);
    const uint64_t v = VTile::k_major(shared.v() + w * 64 * kChunkRowBytes);

    float dK[kTile.dqk / 2], dV[kTile.dv / 2];
#pragma unroll
    for (float& x : dK) x = 0;
#pragma unroll
    for (float& x : dV) x = 0;
    Ring<kStages> ring;
    Ring<kGradientBuffers> ds_ring, previous_ring{kGradientBuffers - 1, 0};
    float* const sums = a.dq_sums ? a.dq_sums + w * kPartOfDq + 4 * thread : nullptr;
    int previous_slot = -1, previous_block = 0;  // of the block whose dQ is next
    const auto turns = shared.turns();
    Ring<Order::kRing> turn_ring;
    const int2 first = kInTurn<Row> && !kLeavesOut ? Order::first_of(tile) : int2{0, 0};
    const int first_lo = uniform_register(first.x), first_hi = uniform_register(first.y);
    const auto add_previous = [&](const float(&dQ)[kColumnsOfDq / 2]) {
      float* const part = sums + int64_t{previous_slot} * kBlockOfDq;
      bool stores = previous_block >= first_lo && previous_block < first_hi;
      if constexpr (kInTurn<Row>) {
        turns.wait(turn_ring);
        if constexpr (kLeavesOut) stores = turns.is_first(turn_ring);
      }
      add_dq(part, w, dQ, stores);
      if constexpr (kInTurn<Row>) {
        turns.done(turn_ring);
        turn_ring.advance();
      }
    };
    Features features(a, tile, tile.key0 + warp_row);
    const BiasSums bias_sums(a, tile, w, shared.bias_sums(w));
    constexpr uint32_t kPitch = GradientTile::kChunkBytes;  // between pieces of a staged bias

    int head = tile.kv_head * p.group;
    // The bias of the block after `block`, to where its dS will be.
    const auto fetch_bias = [&](int block, const Ring<kGradientBuffers>& next) {
      mbarrier_wait(ds_barriers.empty(next.stage), next.phase ^ 1);
      const bool last = block == walk_first + (end - begin - 1) * walk_step;
      if (last && head + 1 == (tile.kv_head + 1) * p.group) return;
      features.fetch_bias(head + last, last ? walk_first : block + walk_step,
                          shared.ds(next.stage) + warp_row * kChunkRowBytes, kPitch);
    };

    // Q of the stage has arrived. masked: some key of the tile is hidden from some query.
    const auto step = [&](int block, int slot, bool masked) {
      float S[kTileM / 2], dP[kTileM / 2], dQ[kColumnsOfDq / 2];
      uint32_t P[kTileM / 4], dS[kTileM / 4];
      const uint64_t q = QTile::k_major(shared.q(ring.stage));
      pin(S);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kTile.dqk / kStepK; ++i) {
        Wgmma<Element, kTileM>::template ss<kMajorK, kMajorK>(S, k + KTile::k_major_step(i),
                                                              q + QTile::k_major_step(i), i > 0);
      }
      wgmma_commit();
      mbarrier_wait(shared.grad_o_barrier(ring.stage), ring.phase);
      const uint64_t grad_o = GradOTile::k_major(shared.grad_o(ring.stage));
      pin(dP);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kTile.dv / kStepK; ++i) {
        Wgmma<Element, kTileM>::template ss<kMajorK, kMajorK>(
            dP, v + VTile::k_major_step(i), grad_o + GradOTile::k_major_step(i), i > 0);
      }
      wgmma_commit();
      const uint32_t lse2 = shared.lse2(ring.stage) + 8 * quad,
                     delta = shared.delta(ring.stage) + 8 * quad;
      const uint32_t warp_ds = shared.ds(ds_ring.stage) + warp_row * kChunkRowBytes;
      if constexpr (kRich) {
        features.look(block, masked);
        if constexpr (!Features::kFetchesBias) {
          mbarrier_wait(ds_barriers.empty(ds_ring.stage), ds_ring.phase ^ 1);
          if (features.stages_bias()) features.stage_bias(block, warp_ds, kPitch);
        }
        if constexpr (kSumsBias<Row>) bias_sums.acquire();
      }
      wgmma_wait<1>();
      pin(S);

      if constexpr (kRich) {
        features.weigh(block, warp_ds, kPitch, lse2, S);
        if constexpr (Features::kFetchesBias) fetch_bias(block, ds_ring.next());
      } else {
#pragma unroll
        for (int g = 0; g < kTileM / 8; ++g) {
          const float2 of_query = load_shared_pair(lse2 + 32 * g);
          float* s = S + 4 * g;
          s[0] = exp2_approx(fmaf(s[0], c, -of_query.x)),
          s[1] = exp2_approx(fmaf(s[1], c, -of_query.y));
          s[2] = exp2_approx(fmaf(s[2], c, -of_query.x)),
          s[3] = exp2_approx(fmaf(s[3], c, -of_query.y));
        }
        if (masked) hide<kTileM>(tile, key, block, S);
      }
      wgmma_wait<0>();
      pin(dP);
      pin(S);  // P is not packed earlier than this: it would take registers of its own
      if constexpr (kRich) features.differentiate(block, warp_ds, kPitch, lse2, delta, S, dP);
#pragma unroll
      for (int g = 0; g < kTileM / 8; ++g) {
        const float* s = S + 4 * g;
        float* dp = dP + 4 * g;
        if constexpr (!kRich) {
          const float2 of_query = load_shared_pair(delta + 32 * g);
          dp[0] = s[0] * (dp[0] - of_query.x), dp[1] = s[1] * (dp[1] - of_query.y);
          dp[2] = s[2] * (dp[2] - of_query.x), dp[3] = s[3] * (dp[3] - of_query.y);
        }
        P[2 * g] = pack<Element>(s[0], s[1]), P[2 * g + 1] = pack<Element>(s[2], s[3]);
        dS[2 * g] = pack<Element>(dp[0], dp[1]), dS[2 * g + 1] = pack<Element>(dp[2], dp[3]);
      }

      if constexpr (!kRich) mbarrier_wait(ds_barriers.empty(ds_ring.stage), ds_ring.phase ^ 1);
      if constexpr (kSumsBias<Row>) bias_sums.stage(dS);
      const uint32_t ds = shared.ds(ds_ring.stage) + ds_row;
#pragma unroll
      for (int i = 0; i < kTileM / kStepK; ++i) {  // unit 2 i + lane / 16 of the row
        stmatrix_x4((ds + i / 4 * GradientTile::kChunkBytes) ^ i % 4 << 5, dS + 4 * i);
      }
      async_proxy_fence();
      __syncwarp();
      if (lane == 0) mbarrier_arrive(ds_barriers.full(ds_ring.stage));

      // The first time there is no block before: what comes out is thrown away.
      if (previous_slot >= 0) ds_barriers.wait(previous_ring);
      issue_dq(shared, previous_ring.stage, w, dQ);
      const uint64_t grad_o_rows = GradOTile::mn_major(shared.grad_o(ring.stage));
      pin(dV);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kTileM / kStepK; ++i) {
        Wgmma<Element, kTile.dv>::template rs<kMajorMN>(
            dV, P + 4 * i, grad_o_rows + GradOTile::mn_major_step(i), 1);
      }
      wgmma_commit();
      const uint64_t q_rows = QTile::mn_major(shared.q(ring.stage));
      pin(dK);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kTileM / kStepK; ++i) {
        Wgmma<Element, kTile.dqk>::template rs<kMajorMN>(dK, dS + 4 * i,
                                                         q_rows + QTile::mn_major_step(i), 1);
      }
      wgmma_commit();
      if constexpr (kSumsBias<Row>) bias_sums.send(head, block);
      wgmma_wait<2>();
      pin(dQ);
      if (previous_slot >= 0) {
        if (lane == 0) ds_barriers.release(previous_ring);
        if (sums) add_previous(dQ);
      }
      wgmma_wait<0>();
      pin(dV);
      pin(dK);
      previous_slot = slot;
      previous_block = block;
      previous_ring = ds_ring;
      ds_ring.advance();
      ring.advance();
    };

    if (begin < end) mbarrier_wait(shared.kv_barrier(), 0);
    const int first_slot =
        uniform_register(tile.kv_head) * p.group * a.slots + uniform_register(tile.first_slot);
    if constexpr (kRich) {
      features.start_head(head);
      if constexpr (Features::kFetchesBias) {
        if (begin < end) {
          features.fetch_bias(head, walk_first, shared.ds(0) + warp_row * kChunkRowBytes, kPitch);
        }
      }
#pragma unroll 1
      while (true) {
        mbarrier_wait(shared.q_barrier(ring.stage), ring.phase);
        const float2 stage = load_shared_pair(shared.block(ring.stage));
        const int member = uniform_register(__float_as_int(stage.x)),
                  block_and_masked = uniform_register(__float_as_int(stage.y));
        if (member < 0) break;
        if (head != tile.kv_head * p.group + member) features.start_head(++head);
        const int block = block_and_masked >> 1;
        step(block, first_slot + member * a.slots + block, block_and_masked & 1);
      }
    } else {
#pragma unroll 1
      for (int member = 0; member < p.group; ++member) {
#pragma unroll 1
        for (int i = begin, block = walk_first; i < end; ++i, block += walk_step) {
          mbarrier_wait(shared.q_barrier(ring.stage), ring.phase);
          step(block, first_slot + member * a.slots + block,
               block < clean_begin || block >= clean_end);
        }
      }
    }
    if (sums && previous_slot >= 0) {
      float dQ[kColumnsOfDq / 2];
      ds_barriers.wait(previous_ring);
      issue_dq(shared, previous_ring.stage, w, dQ);
      wgmma_wait<0>();
      pin(dQ);
      add_previous(dQ);
    }
    if constexpr (kSumsBias<Row>) bias_sums.finish();
    store_gradient<Element>(p, TESSERA_DK, tile, key, p.softmax_scale, p.dqk, dK);
    store_gradient<Element>(p, TESSERA_DV, tile, key, 1.f, p.dv, dV);
  }

  static __device__ __forceinline__ void issue_dq(const Shared shared, int buffer, int w,
                                                  float (&dQ)[kColumnsOfDq / 2]) {
    constexpr uint32_t kHalfOfK = kColumnsOfDq == 64 ? KTile::kChunkBytes : kColumnsOfDq * 2;
    const uint64_t ds = GradientTile::mn_major(shared.ds(buffer) +
                                               (kSplitsRows ? w * GradientTile::kChunkBytes : 0));
    const uint64_t k = KTile::mn_major(shared.k() + (kSplitsRows ? 0 : w * kHalfOfK));
    pin(dQ);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kTileN / kStepK; ++i) {
      Wgmma<Element, kColumnsOfDq>::template ss<kMajorMN, kMajorMN>(
          dQ, ds + GradientTile::mn_major_step(i), k + KTile::mn_major_step(i), i > 0);
    }
    wgmma_commit();
  }
  // dbias where no query of a block sees the tile; by the warps that have nothing else to do.
  static __device__ __forceinline__ void clear_bias(const BackwardParams& a, const KeyTile& tile,
                                                    int thread) {
    if constexpr (kSumsBias<Row>) BiasSums::template clear_unseen<kTileN>(a, tile, thread);
  }
  // first: nothing has been added to the block, not even zeros.
  static __device__ __forceinline__ void add_dq(float* part, int w,
                                                const float (&dQ)[kColumnsOfDq / 2], bool first) {
    // Of 96 columns the second owner has 32.
    const int groups = kTile.dqk == 96 && w == 1 ? 4 : kColumnsOfDq / 8;
#pragma unroll
    for (int i = 0; i < kColumnsOfDq / 8; ++i) {
      if (kTile.dqk == 96 && i >= groups) break;
      float* const to = part + 4 * kWarpgroup * i;
      if constexpr (kInTurn<Row>) {
        store_or_add_to_global(first, to, dQ[4 * i], dQ[4 * i + 1], dQ[4 * i + 2], dQ[4 * i + 3]);
      } else {
        add_to_global(to, dQ[4 * i], dQ[4 * i + 1], dQ[4 * i + 2], dQ[4 * i + 3]);
      }
    }
  }
};

template <typename Element, typename Row>
__global__ void __launch_bounds__(BackwardTile::kThreads, 1)
    backward(const __grid_constant__ BackwardParams a) {
  using Kernel = Backward<Element, Row>;
  extern __shared__ __align__(1024) uint8_t storage[];
  const typename Kernel::Shared shared{static_cast<uint32_t>(__cvta_generic_to_shared(storage))};
  const int warpgroup = uniform_register(threadIdx.x / kWarpgroup);
  if (threadIdx.x == 0) {
    for (const CUtensorMap* map : {&a.q, &a.k, &a.v, &a.grad_o}) tma_prefetch(map);
    shared.init();
  }
  KeyTile& tile = reinterpret_cast<typename Kernel::SharedStorage*>(storage)->tile;
  int index = blockIdx.x;  // known to one thread
  if (threadIdx.x == kWarp) {
    if constexpr (kInTurn<Row>) {
      wait_for_predecessors();
      index = atomicAdd(a.ticket, 1);
    }
    tile = Kernel::Schedule::decode(a, index);
  }
  __syncthreads();
  launch_dependents();
  if (warpgroup == 0) {
    registers_release<Kernel::kProducerRegisters>();
#pragma unroll 1
    for (int sequence = 0;;) {
      if (threadIdx.x < (Kernel::kLeavesOut ? kWarp : 1)) Kernel::producer(a, tile, shared);
      if constexpr (kInTurn<Row>) shared.turns().serve(a, tile);
      if constexpr (!kSumsBias<Row>) break;
      if (sequence == 0 && threadIdx.x >= kWarp) Kernel::clear_bias(a, tile, threadIdx.x - kWarp);
      if (++sequence == a.sequences) break;
      __syncwarp();
      __syncthreads();
      if (threadIdx.x == 0) shared.init_again();
      if (threadIdx.x == kWarp) tile = Kernel::Schedule::decode(a, index, sequence);
      __syncwarp();
      __syncthreads();
    }
  } else {
    registers_claim<Kernel::kOwnerRegisters>();
#pragma unroll 1
    for (int sequence = 0;;) {
      Kernel::owner(a, tile, shared, warpgroup - 1);
      if (!kSumsBias<Row> || ++sequence == a.sequences) break;
      __syncthreads();
      __syncthreads();
    }
  }
}

}  // namespace tessera::cuda::sm90
