// SPDX-License-Identifier: Apache-2.0
// Keys of an E4M3 latent cache on their way into shared memory, as the 16-bit elements that the
// products have: by the four warps of the producer's warpgroup.
//
// A warp has 16 keys of a block. Of two CTAs that share a unit each converts half of the keys and
// copies them to the other one, so that a warp has 8. A lane has a key, or two, 8 apart, of which it
// brings a quarter: 16 bytes of each 64 columns. The rows of the block after are asked for in L2
// meanwhile, so that loads, of which registers hold few, are short. What no row of the unit sees is
// zero, and neither its page nor the page's entry is read.
#pragma once

#include "cuda/common/few/operands.cuh"
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
  static constexpr int kWarps = 4;

  __device__ __forceinline__ MlaConverter(const MlaArgs& args, const MlaWork& work, int rank,
                                          int warp, int lane)
      : args_(args),
        visible_(work.visible),
        lane_(lane),
        first_row_((rank * kWarps + warp) * kKeysOfWarp),
        row_(first_row_ + lane / 4),
        other_(rank ^ 1) {
    const Params& p = args.params;
    const View &k = p.tensor[TESSERA_K], &table = p.tensor[TESSERA_PAGE_TABLE_K];
    int64_t at = work.kv_head * k.stride[2] + lane % 4 * kBytes;
    if (p.page_size > 0) {
      table_ = static_cast<const int32_t*>(table.data) + work.sequence.n * table.stride[0];
    } else {
      at += work.sequence.k.batch * k.stride[0] + work.sequence.k.first * k.stride[1];
    }
    base_ = static_cast<const char*>(k.data) + at;
    key_ = work.piece.key_begin + row_;
    find_rows();
  }

  // The next block, into `buffer`, whose turn is given by the parity of its barriers.
  __device__ __forceinline__ void load(const Shared& shared, int buffer, uint32_t parity) {
    using Tile = typename Kernel::KTile;
    const char* now[kKeysOfLane];
#pragma unroll
    for (int i = 0; i < kKeysOfLane; ++i) now[i] = rows_[i];
    key_ += Kernel::kKeys;
    find_rows();
#pragma unroll
    for (int i = 0; i < kKeysOfLane; ++i) {
      // The four lanes of a row ask for its lines by turns.
      for (int line = lane_ % 4; rows_[i] && line * kLine < Kernel::kTile.dqk; line += 4) {
        l2_prefetch(rows_[i] - lane_ % 4 * kBytes + line * kLine);
      }
    }
    const uint32_t tile = shared.k(buffer);
#pragma unroll
    for (int first = 0; first < Kernel::kChunks; first += kAtOnce) {
      uint4 x[kAtOnce][kKeysOfLane];
#pragma unroll
      for (int c = 0; c < kAtOnce; ++c) {
#pragma unroll
        for (int i = 0; i < kKeysOfLane; ++i) {
          x[c][i] = now[i] ? load_once(now[i] + (first + c) * kChunkColumns) : uint4{0, 0, 0, 0};
        }
      }
#pragma unroll
      for (int c = 0; c < kAtOnce; ++c) {
        const int chunk = first + c;
        if (chunk == 0) mbarrier_wait(shared.k_empty(buffer, 0), parity);
        if (chunk == Kernel::kLeftChunks) mbarrier_wait(shared.k_empty(buffer, 1), parity);
#pragma unroll
        for (int i = 0; i < kKeysOfLane; ++i) {
          const uint32_t words[4] = {x[c][i].x, x[c][i].y, x[c][i].z, x[c][i].w};
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const uint32_t a = words[2 * half], b = words[2 * half + 1];
            store_shared(Tile::unit(tile, row_ + 8 * i, 8 * chunk + lane_ % 4 * 2 + half),
                         uint4{widen_e4m3<Element>(a), widen_e4m3<Element>(a >> 16),
                               widen_e4m3<Element>(b), widen_e4m3<Element>(b >> 16)});
          }
        }
        async_proxy_fence();
        __syncwarp();
        if (lane_ == 0)
          hand_over(shared.k_full(buffer, chunk), Tile::unit(tile, first_row_, 8 * chunk));
      }
    }
  }

 private:
  using Element = typename Kernel::Element;
  static constexpr int kKeysOfWarp = Kernel::kKeys / kWarps / Kernel::kSharers;
  static constexpr int kKeysOfLane = kKeysOfWarp / 8;
  static constexpr int kBytes = 16, kLine = 128;
  // Chunks whose loads are under way.
  static constexpr int kAtOnce = kKeysOfLane == 1 ? Kernel::kChunks : 3;
  static_assert(Kernel::kChunks % kAtOnce == 0);
  static constexpr int kBytesOfWarp = kKeysOfWarp * kChunkRowBytes;  // of a chunk

  // Says that the warp's keys of a chunk are there, in the other CTA too. Called by one lane.
  __device__ __forceinline__ void hand_over(uint32_t full, uint32_t keys) const {
    if constexpr (Kernel::kSharers == 1) {
      mbarrier_arrive(full);
    } else {
      copy_to_cta(address_in(other_, keys), keys, kBytesOfWarp, address_in(other_, full));
      mbarrier_arrive_expect(full, kBytesOfWarp);  // of the other one's
    }
  }

  // Where the lane's keys of the block at key_ lie; null: nobody sees them.
  __device__ __forceinline__ void find_rows() {
    const Params& p = args_.params;
    const View &k = p.tensor[TESSERA_K], &table = p.tensor[TESSERA_PAGE_TABLE_K];
#pragma unroll
    for (int i = 0; i < kKeysOfLane; ++i) {
      const int key = key_ + 8 * i;
      rows_[i] = nullptr;
      if (!visible_.contains(key) || (table_ && p.pages_k == 0)) continue;
      if (!table_) {
        rows_[i] = base_ + key * k.stride[1];
        continue;
      }
      const int at = args_.page_size.quotient(key);
      const int page = clamped(__ldg(table_ + at * table.stride[1]), 0, p.pages_k - 1);
      rows_[i] = base_ + page * k.stride[0] + (key - at * args_.page_size.divisor) * k.stride[1];
    }
  }

  __device__ static __forceinline__ uint4 load_once(const char* from) {
    uint4 x;
    asm volatile("ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(from));
    return x;
  }

  const MlaArgs& args_;
  const Interval visible_;
  const int lane_, first_row_, row_;  // rows of a block: the warp's first, the lane's first
  const int other_;                   // CTA that shares the unit
  int key_;                           // of row_
  const char* base_;                  // the lane's quarter of the first row, or of page 0
  const int32_t* table_ = nullptr;
  const char* rows_[kKeysOfLane];
};

}  // namespace tessera::cuda::sm90
