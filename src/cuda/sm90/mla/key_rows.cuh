// SPDX-License-Identifier: Apache-2.0
// Where keys lie that lanes bring themselves: of each block of a piece, a lane has kKeys, kApart from
// one another. A block's entries of the page table are loaded while the one before is looked up, so
// that no row waits for its entry. What no row of the unit sees is not read: neither its row nor the
// entry of its page.
#pragma once

#include "cuda/sm90/mla/shape.cuh"

namespace tessera::cuda::sm90 {

template <typename Kernel, int kKeys, int kApart>
class MlaKeyRows {
 public:
  // first: the lane's first key of a block. part: where the lane's bytes of a row begin.
  __device__ __forceinline__ MlaKeyRows(const MlaArgs& args, const MlaWork& work, int first,
                                        int part)
      : args_(args), key_(work.piece.key_begin + first), seen_(work.visible) {
    const Params& p = args.params;
    const View &k = p.tensor[TESSERA_K], &table = p.tensor[TESSERA_PAGE_TABLE_K];
    int64_t at = work.kv_head * k.stride[2];
    if (p.page_size > 0) {
      table_ = static_cast<const int32_t*>(table.data) +
               uniform_register(work.sequence.n) * table.stride[0];
      if (p.pages_k == 0) seen_ = {0, 0};
    } else {
      at += work.sequence.k.batch * k.stride[0] + work.sequence.k.first * k.stride[1];
    }
    base_ = static_cast<const char*>(k.data) + at * kElementBytes + part;
    const int end = work.piece.key_begin + work.blocks * Kernel::kKeys;
    seen_ = {uniform_register(seen_.lo), uniform_register(min(seen_.hi, end))};
    ask();
  }

  // The lane's rows of the next block; null: nobody sees the key, or it is another piece's.
  __device__ __forceinline__ void next(const char* (&rows)[kKeys]) {
#pragma unroll
    for (int i = 0; i < kKeys; ++i) rows[i] = row_of(key_ + i * kApart, pages_[i]);
    key_ += Kernel::kKeys;
    ask();
  }

 private:
  static constexpr int kElementBytes = Kernel::kFp8 ? 1 : 2;

  __device__ __forceinline__ const char* row_of(int key, int page) const {
    const Params& p = args_.params;
    const View& k = p.tensor[TESSERA_K];
    if (!seen_.contains(key)) return nullptr;
    if (!table_) return base_ + key * k.stride[1] * kElementBytes;
    const int row = key - args_.page_size.quotient(key) * args_.page_size.divisor;
    const int64_t at = clamped(page, 0, p.pages_k - 1) * k.stride[0] + row * k.stride[1];
    return base_ + at * kElementBytes;
  }

  __device__ __forceinline__ void ask() {
    const int64_t step = args_.params.tensor[TESSERA_PAGE_TABLE_K].stride[1];
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      const int key = key_ + i * kApart;
      pages_[i] = 0;
      if (table_ && seen_.contains(key)) {
        pages_[i] = __ldg(table_ + args_.page_size.quotient(key) * step);
      }
    }
  }

  const MlaArgs& args_;
  int key_;           // the lane's first of the next block
  Interval seen_;     // by some row of the unit, of the piece's blocks
  const char* base_;  // the lane's part of the first row, or of page 0
  const int32_t* table_ = nullptr;
  int pages_[kKeys];  // of the next block, as the table has them
};

}  // namespace tessera::cuda::sm90
