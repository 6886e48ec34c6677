// SPDX-License-Identifier: Apache-2.0
// The producer of decode/kernel.cuh: one warp that walks a CTA's pieces, says what they are and brings
// Q, K and V.
#pragma once

#include "cuda/sm90/decode/shape.cuh"
#include "cuda/sm90/machine/box_walk.cuh"
#include "cuda/sm90/machine/cluster.cuh"
#include "cuda/sm90/machine/pipeline.cuh"

namespace tessera::cuda::sm90 {

template <typename S>
class DecodeProducer {
 public:
  using Shared = typename S::Shared;

  __device__ DecodeProducer(const DecodeArgs& args, DecodeWork* works, const Shared& shared)
      : args_(args), works_(works), shared_(shared), lane_(threadIdx.x % kWarp) {}

  // Called by a whole warp.
  __device__ void produce() {
    const int beside = args_.beside.divisor, run = args_.beside.quotient(blockIdx.x);
    const int which = static_cast<int>(blockIdx.x) - run * beside;
    const bool shares = args_.cluster > 1;
    const Found found =
        shares ? found_unit()
               : find_start(args_, S::kStepKeys, run, args_.beside.quotient(gridDim.x));
    int count = 0;
    for (Walk walk = found.walk(args_, S::kStepKeys, run); shares ? count == 0 : walk.next();
         ++count) {
      const Piece piece =
          shares ? share_of_unit(found.first.cells) : walk.piece().of_beside(beside, which);
      bring(piece, walk.sequence(), count);
    }
    const int slot = count % 2;
    mbarrier_wait(shared_.q_empty(slot), count / 2 % 2 ^ 1);
    if (lane_ == 0) {
      works_[slot].last = 1;
      mbarrier_arrive(shared_.q_full(slot));
    }
  }

 private:
  __device__ __forceinline__ int unit_of_cluster() const {
    return static_cast<int>(blockIdx.x) / args_.cluster;
  }
  // The sequence of the unit that the cluster has, and no runs.
  __device__ __forceinline__ Found found_unit() const {
    Found found;
    found.runs.runs = 0;
    found.first = KnownSequence(args_, args_.packs.quotient(unit_of_cluster()), S::kStepKeys);
    found.knows_first = true;
    return found;
  }
  // Its CTAs have equal parts of its blocks, of which some may have none.
  __device__ __forceinline__ Piece share_of_unit(const CellsOf& cells) const {
    const int rank = rank_in_cluster(), all = args_.cluster;
    Piece piece;
    piece.unit = unit_of_cluster();
    piece.pack = piece.unit - args_.packs.quotient(piece.unit) * args_.packs.divisor;
    piece.row0 = cells.row0;
    piece.key_begin = cells.first_key + cells.steps * rank / all * S::kStepKeys;
    piece.key_end = cells.first_key + cells.steps * (rank + 1) / all * S::kStepKeys;
    piece.parts = all, piece.part = rank;
    piece.first_slot = piece.next_slots = 0;
    return piece;
  }

  // Says what a piece is, and brings its q and its blocks.
  __device__ __forceinline__ void bring(const Piece& piece, const Sequence& sequence, int count) {
    const int queries = args_.queries.divisor;
    DecodeWork work;
    work.last = 0;
    work.sequence = sequence;
    work.piece = piece;
    work.kv_head = args_.packs_kv.quotient(piece.pack);
    work.head0 = piece.pack * args_.pack;
    work.visible = sequence.band.keys(piece.row0, piece.row0 + queries);
    work.clean = sequence.band.keys_of_all(piece.row0, piece.row0 + queries);
    const Interval keys{piece.key_begin, min(piece.key_end, work.visible.hi)};
    work.blocks = max((keys.hi - keys.lo + S::kStepKeys - 1) / S::kStepKeys, 0);
    const Params& p = args_.params;
    BoxWalk<S::kStepKeys> boxes(p, args_.page_size, args_.box_keys, sequence, keys, lane_);
    // The copies are on their way before it is said what they are.
    const int slot = count % 2;
    mbarrier_wait(shared_.q_empty(slot), count / 2 % 2 ^ 1);
    if (lane_ == 0) load_queries(work, slot);
#pragma unroll 1
    for (int block = 0; block == 0 || block < work.blocks; ++block) {
      if (block < work.blocks) load_keys(boxes, work.kv_head, block % S::kTeams);
      if (block == 0 && lane_ == 0) {
        works_[slot] = work;
        mbarrier_arrive_expect(shared_.q_full(slot),
                               S::QTile::kChunks * queries * args_.pack * kChunkRowBytes);
      }
    }
  }

  __device__ __forceinline__ void load_queries(const DecodeWork& work, int slot) {
    using Tile = typename S::QTile;
    const Rows& rows = work.sequence.q;
#pragma unroll
    for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
      tma_load(shared_.q(slot) + chunk * Tile::kChunkBytes, &args_.q, shared_.q_full(slot),
               chunk * kChunkColumns, work.head0, rows.first + work.piece.row0, 0, rows.batch);
    }
  }

  __device__ __forceinline__ void load_keys(BoxWalk<S::kStepKeys>& boxes, int head, int team) {
    boxes.next();
    Ring<S::kStages> ring = team == 0 ? first_ : second_;
    const uint32_t full = shared_.full(team, ring.stage);
    mbarrier_wait(shared_.empty(team, ring.stage), ring.phase ^ 1);
    if (lane_ == 0) mbarrier_arrive_expect(full, 2 * S::kTileBytes);
    __syncwarp();
    if (boxes.has_box()) {
      const uint32_t k = shared_.k(team, ring.stage) + lane_ * args_.box_keys * kChunkRowBytes;
#pragma unroll
      for (int chunk = 0; chunk < S::kChunks; ++chunk) {
        tma_load(k + chunk * S::kChunkBytes, &args_.k, full, chunk * kChunkColumns, head, boxes.row,
                 0, boxes.page_k);
      }
#pragma unroll
      for (int chunk = 0; chunk < S::kChunks; ++chunk) {
        tma_load(k + S::kTileBytes + chunk * S::kChunkBytes, &args_.v, full, chunk * kChunkColumns,
                 head, boxes.row, 0, boxes.page_v);
      }
    }
    ring.advance();
    (team == 0 ? first_ : second_) = ring;
  }

  const DecodeArgs& args_;
  DecodeWork* const works_;
  const Shared shared_;
  const int lane_;
  static_assert(S::kTeams == 2);
  Ring<S::kStages> first_, second_;  // of the teams
};

}  // namespace tessera::cuda::sm90
