// SPDX-License-Identifier: Apache-2.0
// Keys of an E4M3 latent cache on their way into shared memory, as the 16-bit elements that the
// products have: by the four warps of the producer's warpgroup.
//
// A warp has 16 keys of a block. Of two CTAs that share a unit each converts half of the keys and
// copies them to the other one, so that a warp has 8. A lane has a key, or two, 8 apart, of which it
// brings a quarter: 16 bytes of each 64 columns. It holds nine of these units, those that it converts
// next: in place of a converted one the unit nine on is loaded at once, which where a lane has one
// key is that of the same columns of the next block. What no row of the unit sees is zero, and
// neither its page nor the page's entry is read.
#pragma once

#include "cuda/common/few/operands.cuh"
#include "cuda/sm90/mla/key_rows.cuh"
#include "cuda/sm90/mla/shape.cuh"

namespace tessera::cuda::sm90 {

// Two E4M3 of the low 16 bits, of which each value has a 16-bit one.
template <typename Element>
__device__ __forceinline__ uint32_t widen_e4m3(uint32_t pair) {
  const uint32_t halves = halves_of_e4m3(pair);
  if constexpr (__is_same(Element, __half)) return halves;
  const float2 values = unpack<__half>(halves);
  return pack<__nv_bfloat16>(values.x, values.y);
}

template <typename Kernel>
class MlaConverter {
 public:
  using Shared = typename Kernel::Shared;

  __device__ __forceinline__ MlaConverter(const MlaArgs& args, const MlaWork& work,
                                          const Shared& shared, int rank, int warp, int lane)
      : shared_(shared),
        lane_(lane),
        first_row_(uniform_register((rank * Kernel::kBringers + warp) * kKeysOfWarp)),
        other_(rank ^ 1),
        to_(Kernel::KTile::unit(0, first_row_ + lane / 4, lane % 4 * 2)),
        keys_(args, work, first_row_ + lane / 4, lane % 4 * kBytes) {
#pragma unroll
    for (int unit = 0; unit < kHeld; ++unit) load(unit);
  }

  // The next block, into `buffer`, whose turn is given by the parity of its barriers.
  __device__ __forceinline__ void bring(int buffer, uint32_t parity) {
    bring_group<0>(buffer, parity);
    bring_group<1>(buffer, parity);
    bring_group<2>(buffer, parity);
  }

 private:
  using Element = typename Kernel::Element;
  static constexpr int kKeysOfWarp = Kernel::kKeys / Kernel::kBringers / Kernel::kSharers;
  static constexpr int kKeysOfLane = kKeysOfWarp / 8;
  static constexpr int kBytes = 16;
  static constexpr int kUnits = Kernel::kChunks * kKeysOfLane;  // of a lane and a block
  static constexpr int kHeld = Kernel::kChunks;                 // of them, in registers
  static_assert(kUnits % kHeld == 0);
  static constexpr int kBytesOfWarp = kKeysOfWarp * kChunkRowBytes;  // of a chunk
  static_assert(Kernel::kGroups == 3);

  template <int kGroup>
  __device__ __forceinline__ void bring_group(int buffer, uint32_t parity) {
    using Tile = typename Kernel::KTile;
    constexpr int kBegin = Kernel::group_begin(kGroup), kEnd = Kernel::group_begin(kGroup + 1);
    const uint32_t to = shared_.k(buffer) + to_;
    if (kGroup < 2) mbarrier_wait(shared_.k_empty(buffer, kGroup), parity);
#pragma unroll
    for (int unit = kBegin * kKeysOfLane; unit < kEnd * kKeysOfLane; ++unit) {
      const int key = unit % kKeysOfLane, chunk = unit / kKeysOfLane;
      store(to, chunk * Tile::kChunkBytes + key * 8 * kChunkRowBytes, x_[unit % kHeld]);
      load(unit + kHeld);
    }
    async_proxy_fence();
    __syncwarp();
    const int chunk = kBegin + lane_;
    if (chunk < kEnd) {
      hand_over(shared_.k_full(buffer, chunk),
                Tile::unit(shared_.k(buffer), first_row_, 8 * chunk));
    }
  }

  // The unit, of those of this block and beyond it of the next, by chunk and key. Without a branch,
  // so that loads are issued side by side.
  __device__ __forceinline__ void load(int unit) {
    if (unit % kUnits == 0) keys_.next(rows_);
    const int chunk = unit % kUnits / kKeysOfLane;
    const char* const row = rows_[unit % kKeysOfLane];
    uint4 x = {0, 0, 0, 0};
    asm volatile(
        "{\n"
        ".reg .pred exists;\n"
        "setp.ne.b32 exists, %5, 0;\n"
        "@exists ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];\n"
        "}"
        : "+r"(x.x), "+r"(x.y), "+r"(x.z), "+r"(x.w)
        : "l"(row + chunk * kChunkColumns), "r"(int{row != nullptr}));
    x_[unit % kHeld] = x;
  }

  // A unit, which 16-bit elements make two, side by side but for the swizzle. at: from the lane's of
  // its first key and chunk on.
  __device__ __forceinline__ void store(uint32_t to, int at, const uint4& x) const {
    const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t a = words[2 * half], b = words[2 * half + 1];
      store_shared((to ^ half << 4) + at,
                   uint4{widen_e4m3<Element>(a), widen_e4m3<Element>(a >> 16),
                         widen_e4m3<Element>(b), widen_e4m3<Element>(b >> 16)});
    }
  }

  // Says that the warp's keys of a chunk are there, in the other CTA too. Called by a lane a chunk.
  __device__ __forceinline__ void hand_over(uint32_t full, uint32_t keys) const {
    if constexpr (Kernel::kSharers == 1) {
      mbarrier_arrive(full);
    } else {
      copy_to_cta(address_in(other_, keys), keys, kBytesOfWarp, address_in(other_, full));
      mbarrier_arrive_expect(full, kBytesOfWarp);  // of the other one's
    }
  }

  const Shared shared_;
  const int lane_, first_row_;  // first_row_: of a block, the warp's
  const int other_;             // CTA that shares the unit
  const uint32_t to_;           // in a tile, of the lane's first unit
  MlaKeyRows<Kernel, kKeysOfLane, 8> keys_;
  const char* rows_[kKeysOfLane];  // of the block that is being loaded
  uint4 x_[kHeld];
};

}  // namespace tessera::cuda::sm90
