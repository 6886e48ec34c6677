// SPDX-License-Identifier: Apache-2.0
// Keys of a 16-bit latent cache on their way into shared memory where no box of TMA fits its pages:
// by the four warps of the producer's warpgroup, each of which has 16 keys of a block.
//
// Eight lanes copy the 128 bytes that a chunk has of a row; a lane has four keys, 4 apart. The copies
// of a group of chunks are committed together and handed over when they are there, while those of
// a block's worth of groups after it are under way. A warp that has to wait for a buffer
// first hands over all that it has started. What no row of the unit sees is zero, and neither its
// page nor the page's entry is read.
#pragma once

#include "cuda/sm90/machine/copy_groups.cuh"
#include "cuda/sm90/mla/key_rows.cuh"
#include "cuda/sm90/mla/shape.cuh"

namespace tessera::cuda::sm90 {

template <typename Kernel>
class MlaRowCopies {
 public:
  using Shared = typename Kernel::Shared;

  __device__ __forceinline__ MlaRowCopies(const MlaArgs& args, const MlaWork& work,
                                          const Shared& shared, int warp, int lane)
      : shared_(shared),
        anywhere_(static_cast<const char*>(args.params.tensor[TESSERA_Q].data)),
        lane_(lane),
        row_(warp * kKeysOfWarp + lane / kLanesOfRow),
        keys_(args, work, row_, lane % kLanesOfRow * kBytes) {}

  // Starts to copy the next block into `buffer`, whose turn is given by the parity of its barriers:
  // 0 and 1 by turns.
  __device__ __forceinline__ void bring(int buffer, uint32_t parity) {
    const char* rows[kKeysOfLane];
    keys_.next(rows);
    bring_group<0>(rows, buffer, parity);
    bring_group<1>(rows, buffer, parity);
    bring_group<2>(rows, buffer, parity);
  }

  // Hands over all that has been started.
  __device__ __forceinline__ void finish() {
#pragma unroll 1
    while (under_way_ > 0) hand_over_oldest();
  }

 private:
  static constexpr int kKeysOfWarp = Kernel::kKeys / Kernel::kBringers;
  static constexpr int kBytes = 16, kLanesOfRow = kChunkRowBytes / kBytes;
  static constexpr int kApart = kWarp / kLanesOfRow, kKeysOfLane = kKeysOfWarp / kApart;

  static_assert(Kernel::kGroups == 3);

  template <int kGroup>
  __device__ __forceinline__ void bring_group(const char* const (&rows)[kKeysOfLane], int buffer,
                                              uint32_t parity) {
    using Tile = typename Kernel::KTile;
    if (kGroup < 2) acquire(shared_.k_empty(buffer, kGroup), parity);
#pragma unroll
    for (int chunk = Kernel::group_begin(kGroup); chunk < Kernel::group_begin(kGroup + 1);
         ++chunk) {
#pragma unroll
      for (int i = 0; i < kKeysOfLane; ++i) {
        const char* const from = rows[i] ? rows[i] : anywhere_;
        copy_async(
            Tile::unit(shared_.k(buffer), row_ + i * kApart, 8 * chunk + lane_ % kLanesOfRow),
            from + chunk * kChunkRowBytes, rows[i] ? kBytes : 0);
      }
    }
    copy_async_commit();
    if (++under_way_ > Kernel::kGroups) hand_over_oldest();
  }

  // Whoever waits for the buffer's readers may keep nothing that they wait for.
  __device__ __forceinline__ void acquire(uint32_t empty, uint32_t parity) {
    if (!mbarrier_passed(empty, parity)) finish();
    mbarrier_wait(empty, parity);
  }

  __device__ __forceinline__ void hand_over_oldest() {
    const int buffer = oldest_ / Kernel::kGroups, group = oldest_ % Kernel::kGroups;
    copy_async_wait_but<Kernel::kGroups>(--under_way_);
    async_proxy_fence();
    __syncwarp();
    const int chunk = Kernel::group_begin(group) + lane_;
    if (chunk < Kernel::group_begin(group + 1)) mbarrier_arrive(shared_.k_full(buffer, chunk));
    oldest_ = (oldest_ + 1) % (2 * Kernel::kGroups);
  }

  const Shared shared_;
  const char* const anywhere_;  // from where nothing is copied: for zeros
  const int lane_, row_;        // row_: of a block, the lane's first
  MlaKeyRows<Kernel, kKeysOfLane, kApart> keys_;
  int under_way_ = 0;  // groups, from the oldest on
  int oldest_ = 0;     // buffer and group
};

}  // namespace tessera::cuda::sm90
