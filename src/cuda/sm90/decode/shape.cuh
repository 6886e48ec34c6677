// SPDX-License-Identifier: Apache-2.0
// What follows from a row of decode/table.def: the shared memory of a CTA, its barriers, how rows lie
// there, and what the producer says of a piece.
#pragma once

#include <cstddef>
#include <type_traits>

#include "cuda/common/few/merge.cuh"
#include "cuda/sm90/decode/kernels.h"
#include "cuda/sm90/decode/params.h"
#include "cuda/sm90/machine/smem_tile.cuh"

namespace tessera::cuda::sm90 {

// The barrier of all consumers.
inline constexpr NamedBarrier kDecodeMeeting{1};

// A piece of a unit, as its CTA has it.
struct DecodeWork {
  int last;  // 1: there is none, nor will be
  Sequence sequence;
  Piece piece;
  int kv_head, head0;
  int blocks;        // of keys from piece.key_begin on; at least 1
  Interval visible;  // keys that some row of the unit sees
  Interval clean;    // keys that all rows see
};

template <typename T, typename Row>
struct Decode {
  using Query = T;
  static constexpr DecodeTile kTile = Row::kTile;
  static constexpr bool kFp8 = kTile.cache != DecodeCache::same;
  static constexpr bool kE5m2 = kTile.cache == DecodeCache::e5m2;
  using Element = std::conditional_t<kFp8, __half, T>;  // of the products
  static constexpr int kD = kTile.bucket, kRows = kTile.rows, kGroups = kRows / 8;
  static constexpr int kStepKeys = kTile.kKeys, kTeams = kTile.kTeams, kStages = kTile.stages;
  static constexpr int kWarps = kTeams * kTile.kWarpsOfTeam, kConsumers = 32 * kWarps;
  static constexpr int kKeys = kStepKeys / kTile.kWarpsOfTeam;  // of a warp
  static constexpr bool kKeepsHidden = true;  // TMA brings whatever lies behind the last key
  static constexpr bool kKeepsQ = kGroups * kD <= 256;  // as registers allow

  static constexpr int kElementBytes = kFp8 ? 1 : 2;
  static constexpr int kChunks = (kD * kElementBytes + kChunkRowBytes - 1) / kChunkRowBytes;
  static constexpr int kChunkBytes = kStepKeys * kChunkRowBytes;
  static constexpr int kTileBytes = kChunks * kChunkBytes;  // of K, and of V
  using QTile = SmemTile<kRows, kD>;
  using Parts = TeamParts<kWarps, 8, kD>;

  // What CTAs of a cluster read of each other.
  struct PartOfCta {
    float o[kRows][kD];  // not divided by the sums
    float2 sums[kRows];  // maximum in units of log2, sum
  };

  struct SharedStorage {
    alignas(1024) uint8_t ring[kTeams][kStages][2][kTileBytes];  // K, V
    alignas(1024) uint8_t q[2][QTile::kBytes];
    alignas(1024) uint8_t q_half[kFp8 ? QTile::kBytes : 1024];  // q as the products have it
    float q_scale[kRows];  // what a row of q_half was divided by
    Parts parts;
    DecodeWork work[2];
    int last;
    uint64_t full[kTeams][kStages], empty[kTeams][kStages];
    uint64_t q_full[2], q_empty[2];

    __device__ __forceinline__ PartOfCta& part_of_cta() {
      static_assert(sizeof(PartOfCta) <= sizeof ring);
      return *reinterpret_cast<PartOfCta*>(&ring);
    }
  };
  static_assert(sizeof(SharedStorage) <= 227 * 1024);

  // Rows of K and V as TMA writes them. The lane's own unit is 0 or 1, so that an even one further is
  // an exclusive or.
  static __device__ __forceinline__ uint32_t lane_address(uint32_t tile, int row, int unit) {
    return tile + row * kChunkRowBytes + ((unit ^ row % 8) << 4);
  }
  static __device__ __forceinline__ uint32_t at(uint32_t lanes, int unit) {
    return (lanes ^ (unit % 8 << 4)) + unit / 8 * kChunkBytes;
  }
  // The same of q, of group n; a lane's own unit is 0 to 3.
  static __device__ __forceinline__ uint32_t q_lane_address(uint32_t tile, int row, int unit) {
    return tile + row * kChunkRowBytes + ((unit ^ row) << 4);
  }
  static __device__ __forceinline__ uint32_t q_at(uint32_t lanes, int n, int unit) {
    return (lanes ^ (unit % 8 << 4)) + unit / 8 * QTile::kChunkBytes + n * 8 * kChunkRowBytes;
  }

  // Addresses in a CTA's shared memory.
  struct Shared {
    uint32_t base;
    __device__ __forceinline__ uint32_t at(size_t offset) const {
      return base + static_cast<uint32_t>(offset);
    }
    __device__ __forceinline__ uint32_t k(int team, int stage) const {
      return at(offsetof(SharedStorage, ring)) + (team * kStages + stage) * 2 * kTileBytes;
    }
    __device__ __forceinline__ uint32_t v(int team, int stage) const {
      return k(team, stage) + kTileBytes;
    }
    __device__ __forceinline__ uint32_t part_of_cta() const { return k(0, 0); }
    __device__ __forceinline__ uint32_t q(int slot) const {
      return at(offsetof(SharedStorage, q)) + slot * QTile::kBytes;
    }
    __device__ __forceinline__ uint32_t q_half() const {
      return at(offsetof(SharedStorage, q_half));
    }
    __device__ __forceinline__ uint32_t full(int team, int stage) const {
      return at(offsetof(SharedStorage, full)) + 8 * (team * kStages + stage);
    }
    __device__ __forceinline__ uint32_t empty(int team, int stage) const {
      return at(offsetof(SharedStorage, empty)) + 8 * (team * kStages + stage);
    }
    __device__ __forceinline__ uint32_t q_full(int slot) const {
      return at(offsetof(SharedStorage, q_full)) + 8 * slot;
    }
    __device__ __forceinline__ uint32_t q_empty(int slot) const {
      return at(offsetof(SharedStorage, q_empty)) + 8 * slot;
    }
    __device__ void init() const {
      for (int team = 0; team < kTeams; ++team) {
        for (int stage = 0; stage < kStages; ++stage) {
          mbarrier_init(full(team, stage), 1);
          mbarrier_init(empty(team, stage), kTile.kWarpsOfTeam);
        }
      }
      for (int slot = 0; slot < 2; ++slot) {
        mbarrier_init(q_full(slot), 1);
        mbarrier_init(q_empty(slot), kWarps);
      }
      mbarrier_init_fence();
    }
  };
};

}  // namespace tessera::cuda::sm90
