// SPDX-License-Identifier: Apache-2.0
// The producer of a pair of CTAs (backward/pair/kernel.cuh): one thread of each feeds its own by
// TMA.
#pragma once

#include "cuda/sm90/backward/edges.cuh"
#include "cuda/sm90/backward/fused/producer.cuh"
#include "cuda/sm90/machine/pipeline.cuh"
#include "cuda/sm90/machine/ptx.cuh"

namespace tessera::cuda::sm90 {

// Kernel: a BackwardPair.
template <GradientKernel Kernel>
class PairLoader {
 public:
  using Shared = typename Kernel::Shared;
  using QTile = typename Kernel::QTile;
  using GradOTile = typename Kernel::GradOTile;
  using KTile = typename Kernel::KTile;
  using VTile = typename Kernel::VTile;
  using OtherTile = typename Kernel::OtherTile;
  static constexpr int kTileM = Kernel::kTileM, kKeys = Kernel::kKeys;

  __device__ __forceinline__ PairLoader(const BackwardParams& a, const KeyTile& tile,
                                        const Shared shared)
      : a_(a), tile_(tile), shared_(shared) {}

  // Called by one thread, or by one warp where blocks are left out. spans: see load_live_blocks().
  __device__ __forceinline__ void run([[maybe_unused]] Interval* spans) {
    const bool leader = threadIdx.x == 0;
    if (leader && tile_.begin < tile_.end) load_keys();
    wait_for_predecessors();
    if constexpr (Kernel::kLeavesOut) {
      load_live_blocks<Kernel>(a_, tile_, spans, *this);
    } else {
      const int2 walk = Kernel::walk_of(tile_);
#pragma unroll 1
      for (int member = 0; member < a_.problem.group; ++member) {
#pragma unroll 1
        for (int i = tile_.begin, block = walk.x; i < tile_.end; ++i, block += walk.y) {
          load_block(member, block, 0);
        }
      }
    }
    if (Kernel::kRich && leader) store_last();
  }

  __device__ __forceinline__ void load_block(int member, int block, int mask) {
    const int head = tile_.kv_head * a_.problem.group + member;
    const int64_t row = (int64_t{head} * a_.slots + tile_.first_slot + block) * kTileM;
    const MapRow row0 = map_row(a_.reach_q, tile_.q, block * kTileM);  // registers are short here
    const int batch = tile_.q.batch;
    const auto q_barriers = shared_.q_barriers();
    const int stage = acquire_q();
    if constexpr (Kernel::kRich) {
      StagedBlock{member, 4 * block + mask}.store(shared_.block(stage));
    }
    const uint32_t q = q_barriers.full(stage);
    const bool has_mask = Kernel::kLeavesOut && a_.mask_bits;
    mbarrier_arrive_expect(q, QTile::kBytes + kTileM * 4 + (has_mask ? Kernel::kMaskBytes : 0));
    QTile::load(shared_.q(stage), &a_.q, q, head, row0.c2, row0.c3, batch);
    bulk_load(shared_.lse2(stage), a_.lse2 + row, kTileM * 4, q);
    if (has_mask) load_mask(head, block, stage);
    const auto grad_o_barriers = shared_.grad_o_barriers();
    const auto ring = ring_at<Kernel::kGradOStages>(blocks_);
    grad_o_barriers.acquire(ring, GradOTile::kBytes + kTileM * 4);
    const uint32_t grad_o = grad_o_barriers.full(ring.stage);
    GradOTile::load(shared_.grad_o(ring.stage), &a_.grad_o, grad_o, head, row0.c2, row0.c3, batch);
    bulk_load(shared_.delta(ring.stage), a_.delta + row, kTileM * 4, grad_o);
    ++blocks_;
  }

 private:
  static __device__ __forceinline__ int rank() { return blockIdx.x % 2; }
  __device__ __forceinline__ void load_keys() const {
    const MapRow mine = existing_row(a_.reach_k, tile_.k, tile_.key0 + rank() * kKeys),
                 other = existing_row(a_.reach_k, tile_.k, tile_.key0 + (1 - rank()) * kKeys);
    const uint32_t barrier = shared_.kv_barrier();
    const int head = tile_.kv_head, batch = tile_.k.batch;
    mbarrier_arrive_expect(barrier, KTile::kBytes + VTile::kBytes + OtherTile::kBytes);
    KTile::load(shared_.k(), &a_.k, barrier, head, mine.c2, mine.c3, batch);
    VTile::load(shared_.v(), &a_.v, barrier, head, mine.c2, mine.c3, batch);
#pragma unroll
    for (int chunk = 0; chunk < OtherTile::kChunks; ++chunk) {
      tma_load(shared_.k_other() + chunk * OtherTile::kChunkBytes, &a_.k, barrier,
               (Kernel::first_chunk_of_dq(rank()) + chunk) * kChunkColumns, head, other.c2,
               other.c3, batch);
    }
  }
  // The bits of this CTA's keys.
  __device__ __forceinline__ void load_mask(int head, int block, int stage) const {
    const int64_t of_head = tile_.n * a_.mask_stride_batch + head * a_.mask_stride_head;
    const int row = min(tile_.key0 / Kernel::kTileN, a_.mask_tiles - 1) * 2 * Kernel::kWarps +
                    rank() * Kernel::kWarps;
    const int piece = min(block, a_.mask_pieces - 1);
    bulk_load(shared_.mask(stage),
              a_.mask_bits + ((of_head * a_.mask_pieces + piece) * a_.mask_rows + row) * kWarp,
              Kernel::kMaskBytes, shared_.q_barriers().full(stage));
  }
  // The stage of the next block, when it is free.
  __device__ __forceinline__ int acquire_q() const {
    const auto ring = ring_at<Kernel::kQStages>(blocks_);
    mbarrier_wait(shared_.q_barriers().empty(ring.stage), ring.phase ^ 1);
    return ring.stage;
  }
  template <int kStages>
  static __device__ __forceinline__ Ring<kStages> ring_at(uint32_t turn) {
    return {static_cast<int>(turn % kStages), turn / kStages % 2};
  }
  __device__ __forceinline__ void store_last() const {
    const int stage = acquire_q();
    StagedBlock{-1, 0}.store(shared_.block(stage));
    mbarrier_arrive(shared_.q_barriers().full(stage));
  }

  const BackwardParams& a_;
  const KeyTile& tile_;
  const Shared shared_;
  uint32_t blocks_ = 0;  // that have been loaded: registers are short for rings
};

}  // namespace tessera::cuda::sm90
