// SPDX-License-Identifier: Apache-2.0
// The producer of mla/kernel.cuh: one warp that walks a CTA's pieces, says what they are and brings
// Q and K.
#pragma once

#include "cuda/sm90/mla/shape.cuh"

namespace tessera::cuda::sm90 {

template <typename Kernel>
class MlaProducer {
 public:
  using Shared = typename Kernel::Shared;

  __device__ MlaProducer(const MlaArgs& args, MlaWork* works, const Shared& shared, int rank)
      : args_(args), works_(works), shared_(shared), rank_(rank), lane_(threadIdx.x % kWarp) {}

  // Called by a whole warp. run: the CTA's, or that of the CTAs that share units.
  __device__ void produce(int run, int runs) {
    const Found found = find_start<true>(args_, Kernel::kKeys, run, runs);
    if (blockIdx.x == 0 && lane_ == 0) *args_.units_found = found.units;
    int count = 0;
    for (Walk walk(args_, Kernel::kKeys, found.runs, found.start, run); walk.next(); ++count) {
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
      PageWalk pages(args_, work, lane_);
      publish(work, count);
      if (lane_ == 0) load_queries(work);
#pragma unroll 1
      for (int block = 0; block < work.blocks; ++block) load_keys(pages, block % 2);
    }
    MlaWork end;
    end.last = 1;
    publish(end, count);
    if (lane_ == 0) mbarrier_arrive(shared_.q_full());
  }

 private:
  // Where the boxes of one block after the other lie: each lane knows one of a block.
  class PageWalk {
   public:
    __device__ PageWalk(const MlaArgs& args, const MlaWork& work, int lane) : args_(args) {
      boxes_ = Kernel::kKeys / args.box_keys;
      const Params& p = args.params;
      const Rows& rows = work.sequence.k;
      head = work.kv_head;
      key_ = work.piece.key_begin + lane * args.box_keys;
      first_ = rows.first, batch_ = rows.batch;
      const View& table = p.tensor[TESSERA_PAGE_TABLE_K];
      if (p.page_size > 0) {
        table_ = static_cast<const int32_t*>(table.data) + work.sequence.n * table.stride[0];
        step_ = table.stride[1];
      }
      next_ = page_of(key_);
    }
    __device__ bool has_box(int lane) const { return lane < boxes_; }
    // The coordinates of the lane's box of the next block.
    __device__ void next() {
      if (table_) {
        c4 = next_;
        row = key_ - args_.page_size.quotient(key_) * args_.page_size.divisor;
      } else {
        c4 = batch_;
        row = first_ + key_;
      }
      key_ += Kernel::kKeys;
      next_ = page_of(key_);
    }
    int row, c4, head;

   private:
    // A page that no table names is outside of the pool, where TMA brings zeros.
    __device__ int page_of(int key) const {
      constexpr int kNoPage = -1;
      if (!table_) return 0;
      const int page = args_.page_size.quotient(key);
      return page < args_.params.max_pages ? __ldg(table_ + page * step_) : kNoPage;
    }

    const MlaArgs& args_;
    int boxes_, key_, first_, batch_, next_;
    const int32_t* table_ = nullptr;
    int64_t step_ = 0;
  };

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

  __device__ __forceinline__ void load_keys(PageWalk& pages, int buffer) {
    using Tile = typename Kernel::KTile;
    pages.next();
    const uint32_t to = shared_.k(buffer) + lane_ * args_.box_keys * kChunkRowBytes;
    const uint32_t parity = (turns_ >> buffer & 1) ^ 1;
    turns_ ^= 1u << buffer;
#pragma unroll 1
    for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
      const uint32_t full = shared_.k_full(buffer, chunk);
      if (chunk == 0) mbarrier_wait(shared_.k_empty(buffer, 0), parity);
      if (chunk == Kernel::kLeftChunks) mbarrier_wait(shared_.k_empty(buffer, 1), parity);
      if (lane_ == 0) mbarrier_arrive_expect(full, Tile::kChunkBytes);
      if (pages.has_box(lane_)) {
        tma_load(to + chunk * Tile::kChunkBytes, &args_.k, full, chunk * kChunkColumns, pages.head,
                 pages.row, 0, pages.c4);
      }
    }
  }

  const MlaArgs& args_;
  MlaWork* const works_;
  const Shared shared_;
  const int rank_, lane_;
  uint32_t turns_ = 0;  // bit: which turn of a buffer is next
};

}  // namespace tessera::cuda::sm90
