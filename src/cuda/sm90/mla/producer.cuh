// SPDX-License-Identifier: Apache-2.0
// The producer of mla/kernel.cuh: one warp that walks a CTA's pieces, says what they are and brings
// Q and K; or four, which bring K row by row, walk side by side, and of which the first says and
// brings Q.
#pragma once

#include "cuda/sm90/machine/box_walk.cuh"
#include "cuda/sm90/mla/converter.cuh"
#include "cuda/sm90/mla/row_copies.cuh"
#include "cuda/sm90/mla/shape.cuh"

namespace tessera::cuda::sm90 {

template <typename Kernel>
class MlaProducer {
 public:
  using Shared = typename Kernel::Shared;

  __device__ MlaProducer(const MlaArgs& args, MlaWork* works, const Shared& shared, int rank,
                         int warp)
      : args_(args),
        works_(works),
        shared_(shared),
        rank_(rank),
        warp_(warp),
        lane_(threadIdx.x % kWarp) {}

  // Called by whole warps. run: the CTA's, or that of the CTAs that share units.
  __device__ void produce(int run, int runs) {
    const Found found = find_start(args_, Kernel::kKeys, run, runs);
    if (blockIdx.x == 0 && warp_ == 0 && lane_ == 0) *args_.units_found = found.units;
    int count = 0;
    for (Walk walk = found.walk(args_, Kernel::kKeys, run); walk.next(); ++count) {
      const Piece piece = walk.piece();
      const Sequence& sequence = walk.sequence();
      const int queries = args_.queries.divisor;
      MlaWork work;
      work.last = 0;
      work.sequence = sequence;
      work.piece = piece;
      work.kv_head = args_.packs_kv.quotient(piece.pack);
      work.head0 = piece.pack * args_.pack;
      work.visible = sequence.band.keys(piece.row0, piece.row0 + queries);
      work.clean = sequence.band.keys_of_all(piece.row0, piece.row0 + queries);
      const int keys = min(piece.key_end, work.visible.hi) - piece.key_begin;
      work.blocks = max((keys + Kernel::kKeys - 1) / Kernel::kKeys, 1);
      const Params& p = args_.params;
      if (warp_ == 0) {
        publish(work, count);
        if (lane_ == 0) load_queries(work);
      }
      if constexpr (Kernel::kFp8) {
        MlaConverter<Kernel> keys_in(args_, work, shared_, rank_, warp_, lane_);
#pragma unroll 1
        for (int block = 0; block < work.blocks; ++block) {
          keys_in.bring(block % 2, take_turn(block % 2));
        }
      } else if constexpr (!Kernel::kBoxes) {
        MlaRowCopies<Kernel> keys_in(args_, work, shared_, warp_, lane_);
#pragma unroll 1
        for (int block = 0; block < work.blocks; ++block) {
          keys_in.bring(block % 2, take_turn(block % 2));
        }
        keys_in.finish();
      } else {
        BoxWalk<Kernel::kKeys> boxes(p, args_.page_size, args_.box_keys, sequence,
                                     {piece.key_begin, piece.key_begin + max(keys, 0)}, lane_);
#pragma unroll 1
        for (int block = 0; block < work.blocks; ++block) {
          load_keys(boxes, work.kv_head, block % 2);
        }
      }
    }
    if (warp_ != 0) return;
    MlaWork end;
    end.last = 1;
    publish(end, count);
    if (lane_ == 0) mbarrier_arrive(shared_.q_full());
  }

 private:
  // Says what the next piece is, once both consumers have done with Q of the one before.
  __device__ __forceinline__ void publish(const MlaWork& work, int count) {
    mbarrier_wait(shared_.q_empty(), count % 2 ^ 1);
    if (lane_ == 0) works_[count % 2] = work;
    __syncwarp();
  }

  __device__ __forceinline__ void load_queries(const MlaWork& work) {
    using Tile = typename Kernel::QTile;
    const Rows& rows = work.sequence.q;
    const int first_row = rank_ * Kernel::kRows;  // of the unit
    const int head = work.head0 + (first_row & (args_.pack - 1));
    const int row = rows.first + work.piece.row0 + (first_row >> args_.pack_shift);
    mbarrier_arrive_expect(shared_.q_full(), Tile::kBytes);
#pragma unroll 1
    for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
      tma_load(shared_.q() + chunk * Tile::kChunkBytes, &args_.q, shared_.q_full(),
               chunk * kChunkColumns, head, row, 0, rows.batch);
    }
  }

  __device__ __forceinline__ void load_keys(BoxWalk<Kernel::kKeys>& boxes, int head, int buffer) {
    using Tile = typename Kernel::KTile;
    boxes.next();
    const uint32_t to = shared_.k(buffer) + lane_ * args_.box_keys * kChunkRowBytes;
    const uint32_t parity = take_turn(buffer);
#pragma unroll 1
    for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
      const uint32_t full = shared_.k_full(buffer, chunk);
      if (chunk == 0) mbarrier_wait(shared_.k_empty(buffer, 0), parity);
      if (chunk == Kernel::kLeftChunks) mbarrier_wait(shared_.k_empty(buffer, 1), parity);
      if (lane_ == 0) mbarrier_arrive_expect(full, Tile::kChunkBytes);
      if (boxes.has_box()) {
        tma_load(to + chunk * Tile::kChunkBytes, &args_.k, full, chunk * kChunkColumns, head,
                 boxes.row, 0, boxes.page_k);
      }
    }
  }

  // The parity by which to wait until a buffer is free.
  __device__ __forceinline__ uint32_t take_turn(int buffer) {
    const uint32_t parity = (turns_ >> buffer & 1) ^ 1;
    turns_ ^= 1u << buffer;
    return parity;
  }

  const MlaArgs& args_;
  MlaWork* const works_;
  const Shared shared_;
  const int rank_, warp_, lane_;
  uint32_t turns_ = 0;  // bit: which turn of a buffer is next
};

}  // namespace tessera::cuda::sm90
