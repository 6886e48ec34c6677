// SPDX-License-Identifier: Apache-2.0
// The producer of the fused backward kernel: one thread that feeds the owners by TMA.
#pragma once

#include "cuda/sm90/backward/edges.cuh"
#include "cuda/sm90/backward/fused/segments.cuh"
#include "cuda/sm90/backward/score/blocks.cuh"
#include "cuda/sm90/backward/score/features.cuh"
#include "cuda/sm90/machine/pipeline.cuh"
#include "cuda/sm90/machine/ptx.cuh"

namespace tessera::cuda::sm90 {

// Loads the blocks that masks leave to the tile, of every query head. Called by a warp, whose first
// lane loads. Kernel: a Backward or a BackwardPair; spans: of each key of the tile, written where
// they are what masks it.
template <GradientKernel Kernel, typename Loader>
__device__ __forceinline__ void load_live_blocks(const BackwardParams& a, const KeyTile& tile,
                                                 Interval* spans, Loader& loader) {
  using Blocks = typename Kernel::Blocks;
  const int group = a.problem.group;
  const bool leader = threadIdx.x == 0;
  const auto load = [&](int begin, int end, int how, const auto& bits_of) {
#pragma unroll 1
    for (int member = 0; member < group; ++member) {
#pragma unroll 1
      for (int start = begin; start < end; start += kWarp) {
        const typename Blocks::Bits bits = bits_of(tile.kv_head * group + member, start);
        if (!leader) continue;
#pragma unroll 1
        for (uint32_t live = bits.live; live; live &= live - 1) {
          const int i = __ffs(live) - 1;
          loader.load_block(member, start + i, how | (bits.partial >> i & 1) * kMaskCuts);
        }
      }
    }
  };
  // Another warp of the deterministic form passes on the turns of blocks that look() leaves out.
  if constexpr (!Kernel::kPassesTurns) {
    typename Blocks::Reach reach;
    const bool spanned = Blocks::span(a, tile, spans, reach);
    __syncwarp();
    if (spanned) {
      load(reach.begin, reach.end, kMaskIsSpans, [&](int, int start) { return reach.bits(start); });
      return;
    }
  }
  const Blocks blocks(a, tile);
  load(tile.begin, tile.end, 0, [&](int head, int start) { return blocks.look(head, start); });
}

// Kernel: a Backward.
template <GradientKernel Kernel>
struct BackwardProducer {
  using Shared = typename Kernel::Shared;
  using QTile = typename Kernel::QTile;
  using GradOTile = typename Kernel::GradOTile;
  using KTile = typename Kernel::KTile;
  using VTile = typename Kernel::VTile;
  using Args = typename Kernel::Args;
  static constexpr int kTileM = Kernel::kTileM, kStages = Kernel::kStages,
                       kGradOStages = Kernel::kGradOStages,
                       kGradientBuffers = Kernel::kGradientBuffers;
  static constexpr bool kIsTold = Kernel::kIsTold, kLeavesOut = Kernel::kLeavesOut;

  // Loads the stages of Q, lse2, dO and delta, one after the other. Called by one thread.
  class Loader {
   public:
    __device__ __forceinline__ Loader(const Args& a, const KeyTile& tile, const Shared shared)
        : a_(a), tile_(tile), shared_(shared), row0_(map_row(a.reach_q, tile.q, 0)) {}

    __device__ __forceinline__ void load_keys() const {
      const MapRow key = map_row(a_.reach_k, tile_.k, tile_.key0);
      const uint32_t barrier = shared_.kv_barrier();
      mbarrier_arrive_expect(barrier, KTile::kBytes + VTile::kBytes);
      KTile::load(shared_.k(), &a_.k, barrier, tile_.kv_head, key.c2, key.c3, tile_.k.batch);
      VTile::load(shared_.v(), &a_.v, barrier, tile_.kv_head, key.c2, key.c3, tile_.k.batch);
    }
    // K, V and all of the first block that no kernel before this one writes.
    __device__ __forceinline__ void load_first(int block) const {
      const MapRow key = map_row(a_.reach_k, tile_.k, tile_.key0);
      const int head = tile_.kv_head * a_.problem.group + tile_.member,
                c2 = row0_.c2 + block * kTileM, batch = tile_.q.batch;
      const uint32_t q = shared_.q_barrier(0), grad_o = shared_.grad_o_barrier(0);
      if constexpr (Kernel::kOfFp8) {
        using K8Tile = typename Kernel::K8Tile;
        using V8Tile = typename Kernel::V8Tile;
        mbarrier_arrive_expect(q, K8Tile::kBytes + V8Tile::kBytes + kRoundedBytes);
        K8Tile::load(shared_.k8(), &a_.k8, q, tile_.kv_head, key.c2, key.c3, tile_.k.batch);
        load_rounded(0, q, head, c2);
        V8Tile::load(shared_.v8(), &a_.v8, q, tile_.kv_head, key.c2, key.c3, tile_.k.batch);
        mbarrier_arrive_expect(grad_o, KTile::kBytes + k16BitBytes);
        load_16_bits(0, grad_o, head, c2);
        KTile::load(shared_.k(), &a_.k, grad_o, tile_.kv_head, key.c2, key.c3, tile_.k.batch);
        return;
      }
      mbarrier_arrive_expect(q, KTile::kBytes + QTile::kBytes + kTileM * 4);
      KTile::load(shared_.k(), &a_.k, q, tile_.kv_head, key.c2, key.c3, tile_.k.batch);
      QTile::load(shared_.q(0), &a_.q, q, head, c2, row0_.c3, batch);
      mbarrier_arrive_expect(grad_o, VTile::kBytes + GradOTile::kBytes + kTileM * 4);
      VTile::load(shared_.v(), &a_.v, grad_o, tile_.kv_head, key.c2, key.c3, tile_.k.batch);
      GradOTile::load(shared_.grad_o(0), &a_.grad_o, grad_o, head, c2, row0_.c3, batch);
    }
    __device__ __forceinline__ void load_block(int member, int block, int mask) {
      acquire();
      const int head = tile_.kv_head * a_.problem.group + member;
      if constexpr (Kernel::kOfFp8) {
        load_fp8(head, block);
        return advance();
      }
      const int64_t row = (int64_t{head} * a_.slots + tile_.first_slot + block) * kTileM;
      if (Kernel::kStartsEarly && asked_ == 1) {
        bulk_load(shared_.lse2(0), a_.lse2 + row, kTileM * 4, shared_.q_barrier(0));
        bulk_load(shared_.delta(0), a_.delta + row, kTileM * 4, shared_.grad_o_barrier(0));
        return advance();
      }
      const int c2 = row0_.c2 + block * kTileM, batch = tile_.q.batch;
      const uint32_t q = shared_.q_barrier(ring_.stage),
                     grad_o = shared_.grad_o_barrier(grad_o_ring_.stage);
      if constexpr (kIsTold) store_block(member, block, mask);
      const bool has_mask = kLeavesOut && !Kernel::kOfSegments && a_.mask_bits;
      mbarrier_arrive_expect(q, QTile::kBytes + kTileM * 4 + (has_mask ? Kernel::kMaskBytes : 0));
      if (has_mask) load_mask(head, block, q);
      QTile::load(shared_.q(ring_.stage), &a_.q, q, head, c2, row0_.c3, batch);
      bulk_load(shared_.lse2(ring_.stage), a_.lse2 + row, kTileM * 4, q);
      // dO of block i is asked for one block later if it has a stage less.
      if (kGradOStages < kStages && asked_ > 2) shared_.ds_barriers().wait(ds_ring_);
      mbarrier_arrive_expect(grad_o, GradOTile::kBytes + kTileM * 4);
      GradOTile::load(shared_.grad_o(grad_o_ring_.stage), &a_.grad_o, grad_o, head, c2, row0_.c3,
                      batch);
      bulk_load(shared_.delta(grad_o_ring_.stage), a_.delta + row, kTileM * 4, grad_o);
      advance();
    }
    __device__ __forceinline__ int asked() const { return asked_; }
    __device__ __forceinline__ void store_last() {
      acquire();
      store_block(-1, 0, 0);
      mbarrier_arrive(shared_.q_barrier(ring_.stage));
    }

   private:
    // ---- products of E4M3: Q and dO of E4M3 with lse2 on q, those of 16 bits with delta on grad_o

    // A statistic and a factor of each query come with each.
    static constexpr int kStatisticsBytes = 2 * kTileM * 4,
                         kRoundedBytes = Kernel::kRoundedBytes + kStatisticsBytes,
                         k16BitBytes = QTile::kBytes + GradOTile::kBytes + kStatisticsBytes;

    __device__ __forceinline__ void load_rounded(int stage, uint32_t barrier, int head,
                                                 int c2) const {
      const int batch = tile_.q.batch;
      Kernel::Q8Tile::load(shared_.q8(stage), &a_.q8, barrier, head, c2, row0_.c3, batch);
      Kernel::GradO8Tile::load(shared_.grad_o8(stage), &a_.grad_o8, barrier, head, c2, row0_.c3,
                               batch);
    }
    __device__ __forceinline__ void load_16_bits(int stage, uint32_t barrier, int head,
                                                 int c2) const {
      const int batch = tile_.q.batch;
      QTile::load(shared_.q(stage), &a_.q, barrier, head, c2, row0_.c3, batch);
      GradOTile::load(shared_.grad_o(stage), &a_.grad_o, barrier, head, c2, row0_.c3, batch);
    }
    __device__ __forceinline__ void load_fp8(int head, int block) {
      const int c2 = row0_.c2 + block * kTileM;
      const int slot = head * a_.slots + tile_.first_slot + block;  // of 2^30 (require_tiles)
      constexpr int64_t kStatistics = 2 * kTileM;
      const uint32_t q = shared_.q_barrier(ring_.stage);
      if (asked_ > 1) {  // load_first() has asked for all but statistics
        mbarrier_arrive_expect(q, kRoundedBytes);
        load_rounded(ring_.stage, q, head, c2);
      }
      bulk_load(shared_.lse2(ring_.stage), a_.lse2 + slot * kStatistics, kStatisticsBytes, q);
      // With two stages of 16 bits that of block i - 2 is free when both owners have dS(i - 1).
      if (kGradOStages < kStages && asked_ > 2) shared_.ds_barriers().wait(ds_ring_);
      const uint32_t grad_o = shared_.grad_o_barrier(grad_o_ring_.stage);
      if (asked_ > 1) {
        mbarrier_arrive_expect(grad_o, k16BitBytes);
        load_16_bits(grad_o_ring_.stage, grad_o, head, c2);
      }
      bulk_load(shared_.delta(grad_o_ring_.stage), a_.delta + slot * kStatistics, kStatisticsBytes,
                grad_o);
    }

    __device__ __forceinline__ void advance() {
      ring_.advance();
      grad_o_ring_.advance();
    }
    __device__ __forceinline__ void load_mask(int head, int block, uint32_t barrier) const {
      const int64_t of_head = tile_.n * a_.mask_stride_batch + head * a_.mask_stride_head;
      const int row = min(tile_.key0 / Kernel::kTileN, a_.mask_tiles - 1) * Kernel::kOwnerWarps;
      constexpr int kBytes = Kernel::kMaskBytes / Kernel::kPieces;
#pragma unroll
      for (int i = 0; i < Kernel::kPieces; ++i) {
        const int piece = min(block * Kernel::kPieces + i, a_.mask_pieces - 1);
        bulk_load(shared_.mask(ring_.stage) + i * kBytes,
                  a_.mask_bits + ((of_head * a_.mask_pieces + piece) * a_.mask_rows + row) * kWarp,
                  kBytes, barrier);
      }
    }
    // Block i is asked for when both owners have dS(i - 2).
    __device__ __forceinline__ void acquire() {
      if (++asked_ <= 2) return;
      shared_.ds_barriers().wait(ds_ring_);
      ds_ring_.advance();
    }
    __device__ __forceinline__ void store_block(int member, int block, int rules) const {
      StagedBlock{member, block << Kernel::kStagedBits | rules}.store(shared_.block(ring_.stage));
    }

    const Args& a_;
    const KeyTile& tile_;
    const Shared shared_;
    const MapRow row0_;
    Ring<kStages> ring_;
    Ring<kGradOStages> grad_o_ring_;
    Ring<kGradientBuffers> ds_ring_;
    int asked_ = 0;
  };

  // Called by one thread, which has just found the tile, before anybody else knows of it.
  static __device__ __forceinline__ void start(const Args& a, const KeyTile& tile,
                                               const Shared shared) {
    if (tile.begin >= tile.end) return;
    Loader(a, tile, shared).load_first(Kernel::walk_of(tile).x);
  }

  // Called by one thread, or by one warp where blocks are left out. lse2, delta and zeros in the
  // sums are the kernel's before, which is waited for also without work: the next kernel waits for
  // this one alone. masks: of the tile, written where they are intervals, see load_live_blocks().
  static __device__ __forceinline__ void run(const Args& a, const KeyTile& tile,
                                             const Shared shared,
                                             [[maybe_unused]] typename Kernel::MasksOfTile& masks) {
    Loader loader(a, tile, shared);
    const int2 walk = Kernel::walk_of(tile);
    const bool leader = threadIdx.x == 0;
    if (!Kernel::kStartsEarly && leader && tile.begin < tile.end) loader.load_keys();
    wait_for_predecessors();
    if constexpr (kLeavesOut) {
      if constexpr (Kernel::kOfSegments) {
        load_blocks_of_segments<Kernel>(a, tile, masks, loader);
      } else {
        load_live_blocks<Kernel>(a, tile, masks.spans, loader);
      }
      if (leader) loader.store_last();
    } else {
      for_each_block<Kernel::kInnerLoop>(a, tile.members, tile.begin, tile.end, walk.x, walk.y,
                                         [&](int member, int block) {
                                           OwedToSections<Kernel>::before_block(a, tile, loader);
                                           loader.load_block(tile.member + member, block, 0);
                                         });
      if constexpr (kIsTold) loader.store_last();
    }
  }
};

}  // namespace tessera::cuda::sm90
