// SPDX-License-Identifier: Apache-2.0
// The backward pass in sections of heads: zeros in the sums of dq before the products, dq after
// them. Two small kernels do that for the first and the last section, and for all heads where there
// is but one; else it is done by the tiles of the section before and of the section after, where
// memory is idle: zeros by warps that have nothing else to do, dq by the owners while their last
// rows are on their way.
//
//   a tile of section s     clears its part of a head of section s + 1, as it starts
//                           adds to its own head
//                           converts its part of a head of section s - 1, as it ends
//
//   counter of a head       counts
//   cleared                 tiles that have cleared their parts; who adds waits for all of them
//   added                   tiles that have added; who converts waits for all of them
//
// Three roles take part, each by calls that are nothing where there are no sections:
//
//   role                       calls                            which
//   the thread that loads      OwedToSections::before_block()   waits for zeros
//   the producer's warpgroup   OwedToSections::serve()          clears; tells when sums are complete
//   the owners                 SumsOfOthers                     converts
//
// Where several CTAs share a tile (backward/fused/share.cuh), each is a tile here.
//
// CTAs start in the order of their index (the scans of NVIDIA's CUB rely on that, too): whoever is
// waited for has started before, and waits itself for none but earlier ones.
#pragma once

#include "cuda/common/element.cuh"
#include "cuda/sm90/backward/edges.cuh"
#include "cuda/sm90/backward/schedule/schedule.cuh"
#include "cuda/sm90/machine/ptx.cuh"

namespace tessera::cuda::sm90 {

// Sums of other tiles are cleared. backward/fused/turns.cuh has 6.
inline constexpr NamedBarrier kCleared{5};

// The slot in which the statistics of block 0, and its dQ sums, begin.
__device__ __forceinline__ int64_t slot_of_head(const BackwardParams& a, int head, int slot) {
  return int64_t{head} * a.slots + slot;
}

// Zeros in the sums of a block. Thread `thread` of `threads`.
template <GradientKernel Kernel>
__device__ __forceinline__ void clear_sums(const BackwardParams& a, int64_t slot, int thread,
                                           int threads) {
  auto* sums = reinterpret_cast<float4*>(a.dq_sums + slot * Kernel::kBlockOfDq);
  for (int i = thread; i < Kernel::kBlockOfDq / 4; i += threads) sums[i] = float4{};
}

// Part of a block's sums, from the L2: that is where others have added. Called by a warpgroup.
template <GradientKernel Kernel>
__device__ __forceinline__ void load_sums(const BackwardParams& a, int64_t slot, int part,
                                          bool summed, float (&dQ)[Kernel::kColumnsOfDq / 2]) {
  const float* sums = a.dq_sums + (summed ? slot : 0) * Kernel::kBlockOfDq +
                      part * Kernel::kPartOfDq + 4 * (threadIdx.x % kWarpgroup);
#pragma unroll
  for (int i = 0; i < Kernel::kColumnsOfDq / 8; ++i) {
    float4 x{};
    if (summed) x = __ldcg(reinterpret_cast<const float4*>(sums + 4 * kWarpgroup * i));
    dQ[4 * i] = x.x, dQ[4 * i + 1] = x.y, dQ[4 * i + 2] = x.z, dQ[4 * i + 3] = x.w;
  }
}

// dq = softmax_scale * sums, of the block from row `begin` on; zeros in rows that are stored but
// belong to no sequence.
template <typename Element, GradientKernel Kernel>
__device__ __forceinline__ void store_dq(const BackwardParams& a, const Rows& rows, int head,
                                         int begin, int part,
                                         float (&dQ)[Kernel::kColumnsOfDq / 2]) {
  constexpr int kColumns = Kernel::kColumnsOfDq;
  const Params& p = a.problem;
  const View& view = p.tensor[TESSERA_DQ];
  const int thread = threadIdx.x % kWarpgroup, lane = thread % kWarp;
  const int first = begin + (Kernel::kSplitsRows ? part * 64 : 0) + thread / kWarp * 16 + lane / 4;
  keep_rows(first < rows.length, first + 8 < rows.length, dQ);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = first + 8 * r;
    const bool stored = row >= rows.owned_lo && row < rows.owned_hi;
    Element* to =
        static_cast<Element*>(view.data) + offset_of(view, rows.batch, rows.first + row, head);
    store_row<Element, kColumns>(to, stored, Kernel::kSplitsRows ? 0 : part * kColumns, p.dqk,
                                 p.softmax_scale, dQ, r, lane);
  }
}

// Key heads of the batch in their order, and what a tile does for others of them. Sequences are
// padded: all have the same number of blocks.
class Section {
 public:
  __device__ __forceinline__ Section(const BackwardParams& a, const KeyTile& tile, int tile_m,
                                     int tile_n)
      : a_(a),
        heads_(a.problem.batch * a.problem.hk),
        tiles_(a.parts > 0 ? a.parts : (a.problem.sk + tile_n - 1) / tile_n),
        index_(tile.part),
        blocks_((a.problem.sq + tile_m - 1) / tile_m),
        head_(tile.n * a.problem.hk + tile.kv_head) {}

  // Only as many heads of the last section, which may be larger, have one before them.
  __device__ __forceinline__ bool clears() const { return head_ < a_.last_head; }
  __device__ __forceinline__ bool adds_to_cleared() const {
    return head_ >= a_.ahead && head_ < a_.last_head + a_.ahead;
  }
  __device__ __forceinline__ bool converts() const { return adds_to_cleared(); }

  // Called by all lanes of warps of which this is thread `thread` of `threads`.
  template <GradientKernel Kernel>
  __device__ __forceinline__ void clear(int thread, int threads) const {
    for (int i = index_; exists(i); i += tiles_) {
      clear_sums<Kernel>(a_, block_of(head_ + a_.ahead, i).slot, thread, threads);
    }
    named_barrier_sync(kCleared, threads);
    if (thread == 0) count(cleared(head_ + a_.ahead));
  }
  // Called by one thread.
  __device__ __forceinline__ void wait_for_zeros() const { wait(cleared(head_)); }
  // Makes what the thread knows to be added there for all to see. Called by one thread.
  __device__ __forceinline__ void signal_added() const { count(added(head_)); }
  __device__ __forceinline__ void wait_for_sums() const { wait(added(head_ - a_.ahead)); }

  // Called by warpgroup w of two, one of whose parts it converts. The sums of the tile's first
  // blocks are loaded when registers are free for them and stored when they have come; then all
  // others.
  template <GradientKernel Kernel>
  struct Sums {
    static constexpr int kBlocks = 2;
    float dQ[kBlocks][Kernel::kColumnsOfDq / 2];
  };
  template <GradientKernel Kernel>
  __device__ __forceinline__ void load_first(int w, Sums<Kernel>& sums) const {
#pragma unroll
    for (int i = 0; i < Sums<Kernel>::kBlocks; ++i) {
      const BlockOfHead at = block_of(index_ + i * tiles_);
      load_sums<Kernel>(a_, at.slot, w, exists(index_ + i * tiles_) && has_sums<Kernel>(at),
                        sums.dQ[i]);
    }
  }
  template <typename Element, GradientKernel Kernel>
  __device__ __forceinline__ void convert(int w, Sums<Kernel>& sums) const {
#pragma unroll
    for (int i = 0; i < Sums<Kernel>::kBlocks; ++i) {
      if (exists(index_ + i * tiles_)) store<Element, Kernel>(index_ + i * tiles_, w, sums.dQ[i]);
    }
#pragma unroll 1
    for (int i = index_ + Sums<Kernel>::kBlocks * tiles_; exists(i); i += tiles_) {
      const BlockOfHead at = block_of(i);
      load_sums<Kernel>(a_, at.slot, w, has_sums<Kernel>(at), sums.dQ[0]);
      store<Element, Kernel>(i, w, sums.dQ[0]);
    }
  }

 private:
  // Block i of all query heads of key head x.
  struct BlockOfHead {
    int n, head, block;
    int64_t slot;
  };
  __device__ __forceinline__ BlockOfHead block_of(int x, int i) const {
    const int n = x / a_.problem.hk, member = i / blocks_, block = i - member * blocks_,
              head = (x - n * a_.problem.hk) * a_.problem.group + member;
    return {n, head, block, slot_of_head(a_, head, n * blocks_ + block)};
  }
  __device__ __forceinline__ bool exists(int i) const { return i < a_.problem.group * blocks_; }
  // Block i of the head that is converted.
  __device__ __forceinline__ BlockOfHead block_of(int i) const {
    return block_of(head_ - a_.ahead, i);
  }
  template <GradientKernel Kernel>
  __device__ __forceinline__ bool has_sums(const BlockOfHead& at) const {
    return at.block * Kernel::kTileM < length_of<SideOfQueries>(a_.problem, at.n);
  }
  template <typename Element, GradientKernel Kernel>
  __device__ __forceinline__ void store(int i, int w, float (&dQ)[Kernel::kColumnsOfDq / 2]) const {
    const BlockOfHead at = block_of(i);
    store_dq<Element, Kernel>(a_, rows_of<SideOfQueries>(a_.problem, at.n), at.head,
                              at.block * Kernel::kTileM, w, dQ);
  }
  __device__ __forceinline__ int* cleared(int x) const { return a_.counts + x; }
  __device__ __forceinline__ int* added(int x) const { return a_.counts + heads_ + x; }
  static __device__ __forceinline__ void count(int* counter) {
    __threadfence();
    atomicAdd(counter, 1);
  }
  __device__ __forceinline__ void wait(const int* counter) const {
    while (load_acquire(counter) < tiles_) __nanosleep(200);
  }

  const BackwardParams& a_;
  const int heads_, tiles_, index_, blocks_, head_;
};

// What the producer's warpgroup does for the sections beside the tile's own. Kernel: a Backward.
template <GradientKernel Kernel>
struct OwedToSections {
  // Called by the thread that loads, before each block. The loader is asked late: one number as an
  // argument gave another order of instructions.
  template <typename Loader>
  static __device__ __forceinline__ void before_block(const BackwardParams& a, const KeyTile& tile,
                                                      const Loader& loader) {
    if constexpr (Kernel::kInSections) {
      // Owners add to the first block's sums in the second one's step, if there is one.
      const int blocks = (tile.end - tile.begin) * tile.members;
      if (a.ahead > 0 && loader.asked() == min(blocks - 1, 1)) {
        const Section section(a, tile, Kernel::kTileM, Kernel::kTileN);
        if (section.adds_to_cleared()) section.wait_for_zeros();
      }
    }
  }
  // Called by the whole warpgroup, when all blocks have been asked for.
  static __device__ __forceinline__ void serve(const BackwardParams& a, const KeyTile& tile,
                                               const typename Kernel::Shared shared) {
    if constexpr (Kernel::kInSections) {
      if (a.ahead > 0) clear_and_tell(a, tile, shared);
    }
  }

 private:
  static __device__ __forceinline__ void clear_and_tell(const BackwardParams& a,
                                                        const KeyTile& tile,
                                                        const typename Kernel::Shared shared) {
    const Section section(a, tile, Kernel::kTileM, Kernel::kTileN);
    if (threadIdx.x == 0) {
      if constexpr (Kernel::kConverts) {
        mbarrier_wait(shared.added_barrier(), 0);
        section.signal_added();
      }
    } else if (threadIdx.x >= kWarp) {
      wait_for_predecessors();  // zeros in the counters, and nobody reads the sums any more
      const int thread = threadIdx.x - kWarp;
      if (section.clears()) {
        section.template clear<Kernel>(thread, kWarpgroup - kWarp);
      }
      if (Kernel::kConverts && thread == 0 && section.converts()) {
        section.wait_for_sums();
        mbarrier_arrive(shared.sums_barrier());
      }
    }
  }
};

// What an owner converts as its tile ends. Kernel: a Backward; nothing where its tiles do not.
template <typename Element, GradientKernel Kernel, bool kConverts = Kernel::kConverts>
class SumsOfOthers {
 public:
  // Registers are free for the first ones. ready: the barrier that says that sums are complete.
  __device__ __forceinline__ void load(const BackwardParams& a, const KeyTile& tile, int w,
                                       uint32_t ready) {
    const Section section(a, tile, Kernel::kTileM, Kernel::kTileN);
    converts_ = a.ahead > 0 && section.converts();
    if (!converts_) return;
    mbarrier_wait(ready, 0);
    section.load_first<Kernel>(w, sums_);
  }
  // This warp has added all of its tile's own dQ.
  static __device__ __forceinline__ void signal_added(uint32_t barrier) {
    __syncwarp();
    if (threadIdx.x % kWarp == 0) mbarrier_arrive(barrier);
  }
  __device__ __forceinline__ void convert(const BackwardParams& a, const KeyTile& tile, int w) {
    if (!converts_) return;
    Section(a, tile, Kernel::kTileM, Kernel::kTileN).template convert<Element, Kernel>(w, sums_);
  }

 private:
  bool converts_;
  Section::Sums<Kernel> sums_;
};
template <typename Element, GradientKernel Kernel>
class SumsOfOthers<Element, Kernel, false> {
 public:
  __device__ __forceinline__ void load(const BackwardParams&, const KeyTile&, int, uint32_t) {}
  static __device__ __forceinline__ void signal_added(uint32_t) {}
  __device__ __forceinline__ void convert(const BackwardParams&, const KeyTile&, int) {}
};

}  // namespace tessera::cuda::sm90
