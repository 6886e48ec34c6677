// SPDX-License-Identifier: Apache-2.0
// Where the boxes of one block of keys after the other lie, for a producer warp: a box is as many
// keys as a page and a block have in common, and each of a warp's first lanes has one of a block.
// The pages of 32 boxes are looked up at a time, ahead of those that are used.
#pragma once

#include "cuda/common/divisor.h"
#include "cuda/common/sequence.cuh"
#include "cuda/sm90/machine/ptx.cuh"

namespace tessera::cuda::sm90 {

template <int kKeys>
class BoxWalk {
 public:
  // keys: those of the piece, from a multiple of a block on. kTables: of k alone, or of v too.
  __device__ __forceinline__ BoxWalk(const Params& p, const Divisor& page_size, int box_keys,
                                     const Sequence& sequence, const Interval& keys, int lane)
      : page_size_(page_size),
        max_pages_(p.max_pages),
        boxes_(kKeys / box_keys),
        box_keys_(box_keys),
        lane_(lane),
        key_(keys.lo + lane * box_keys),
        end_(keys.hi) {
    const View &k = p.tensor[TESSERA_PAGE_TABLE_K], &v = p.tensor[TESSERA_PAGE_TABLE_V];
    if (p.page_size > 0) {
      table_k_ = static_cast<const int32_t*>(k.data) + sequence.n * k.stride[0];
      step_ = k.stride[1];
      if (v.data != k.data && v.data) {
        table_v_ = static_cast<const int32_t*>(v.data) + sequence.n * v.stride[0];
        step_v_ = v.stride[1];
      }
      asked_ = key_;
      ask();
    } else {
      page_k = page_v = sequence.k.batch;
      row = sequence.k.first + key_ - kKeys;
    }
  }
  __device__ __forceinline__ bool has_box() const { return lane_ < boxes_; }
  // The coordinates of the lane's box of the next block.
  __device__ __forceinline__ void next() {
    if (!table_k_) {
      row += kKeys;
      return;
    }
    if (used_ == kWarp) {
      used_ = 0;
      now_k_ = ahead_k_, now_v_ = ahead_v_;
      asked_ += kWarp * box_keys_;
      ask();
    }
    page_k = page_v = __shfl_sync(kAllLanes, now_k_, used_ + lane_ % boxes_);
    if (table_v_) page_v = __shfl_sync(kAllLanes, now_v_, used_ + lane_ % boxes_);
    row = key_ - page_size_.quotient(key_) * page_size_.divisor;
    used_ += boxes_;
    key_ += kKeys;
  }
  int row, page_k, page_v;  // page: or the index on the axis of the batch

 private:
  // A page that no table names is outside of the pool, where TMA brings zeros.
  __device__ __forceinline__ void ask() {
    constexpr int kNoPage = -1;
    ahead_k_ = ahead_v_ = kNoPage;
    if (asked_ >= end_) return;
    const int page = page_size_.quotient(asked_);
    if (page >= max_pages_) return;
    ahead_k_ = __ldg(table_k_ + page * step_);
    if (table_v_) ahead_v_ = __ldg(table_v_ + page * step_v_);
  }

  const Divisor page_size_;
  const int max_pages_, boxes_, box_keys_, lane_;
  int key_, end_;  // of the lane's box of the next block
  int asked_, now_k_, now_v_, ahead_k_, ahead_v_, used_ = kWarp;
  const int32_t *table_k_ = nullptr, *table_v_ = nullptr;  // table_v_: where it is another
  int64_t step_ = 0, step_v_ = 0;
};

}  // namespace tessera::cuda::sm90
