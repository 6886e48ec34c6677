// SPDX-License-Identifier: Apache-2.0
// What follows from a row of mla/table.def: the shared memory of a CTA, its barriers, and what the
// producer says of a piece.
#pragma once

#include <cstddef>

#include "cuda/common/element.cuh"
#include "cuda/common/work/work.cuh"
#include "cuda/sm90/machine/pipeline.cuh"
#include "cuda/sm90/machine/smem_tile.cuh"
#include "cuda/sm90/mla/kernels.h"
#include "cuda/sm90/mla/params.h"

namespace tessera::cuda::sm90 {

// Named barriers of the consumers. Rows of P and references of either are there; sums of both are;
// and, one for each consumer, V is free of rows that nobody sees.
inline constexpr NamedBarrier kFirstWeights{1}, kSecondWeights{2}, kBothSums{3};
constexpr __device__ NamedBarrier cleared_barrier(int w) { return NamedBarrier{4 + w}; }

// A piece of a unit, as its CTA has it.
struct MlaWork {
  int last;  // 1: there is none, nor will be
  Sequence sequence;
  Piece piece;
  int kv_head, head0;  // head0: of the unit
  int blocks;          // of keys from piece.key_begin on; at least 1
  Interval visible;    // keys that some row of the unit sees
  Interval clean;      // keys that all rows see
};

template <typename T, typename Row>
struct Mla {
  using Element = T;
  static constexpr MlaTile kTile = Row::kTile;
  static constexpr int kCtas = kTile.ctas, kRows = kTile.kRows, kKeys = kTile.kKeys;
  static constexpr int kUnitRows = kTile.rows();
  static constexpr int kConsumers = 2, kColumns = kTile.dv / kConsumers;  // of O, a consumer's
  static constexpr bool kFp8 = kTile.keys == MlaKeys::e4m3;
  static constexpr bool kBoxes = kTile.keys == MlaKeys::boxes;
  static constexpr int kSharers = kTile.sharers();
  // Warps that convert an E4M3 cache hold values in registers, which TMA does not.
  static constexpr int kProducerRegisters = kFp8 ? 88 : 72;
  static constexpr int kConsumerRegisters = kFp8 ? 208 : 216;
  static constexpr int kBringers = kBoxes ? 1 : 4;  // warps
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= 3 * 168);
  using QTile = SmemTile<kRows, kTile.dqk>;
  using KTile = SmemTile<kKeys, kTile.dqk>;
  using VTile = SmemTile<kKeys, kTile.dv>;  // the first columns of K
  using PTile = SmemTile<kRows, kKeys>;
  static constexpr int kChunks = KTile::kChunks;
  static constexpr int kLeftChunks = kColumns / kChunkColumns;  // that the left half of V has
  // Chunks that warps say together to have brought: those of the left half of V, and two more groups.
  static constexpr int kGroups = 3;
  static constexpr __host__ __device__ int group_begin(int group) {
    if (group == 0) return 0;
    return group == kGroups ? kChunks : kLeftChunks + (group - 1) * (kChunks - kLeftChunks + 1) / 2;
  }
  static_assert(VTile::kChunkBytes == KTile::kChunkBytes && kColumns == 256);
  static_assert(PTile::kBytes <= KTile::kChunkBytes && VTile::kChunks < kChunks);

  struct SharedStorage {
    alignas(1024) uint8_t q[QTile::kBytes];
    alignas(1024) uint8_t k[2][KTile::kBytes];
    alignas(1024) uint8_t p[PTile::kBytes];
    float reference[kConsumers][kRows];  // of softmax, in units of log2
    float sum[kConsumers][kRows];
    MlaWork work[2];
    uint64_t q_full, q_empty;
    uint64_t k_full[2][kChunks];  // a barrier a chunk: S begins with the first
    // The left half of V; the right one and the columns beyond V: free in all CTAs that bring keys
    // here.
    uint64_t k_empty[2][2];
    uint64_t k_sent;  // the other CTA has what it gets of the second K: P may lie there
  };

  // Addresses in a CTA's shared memory.
  struct Shared {
    uint32_t base;
    __device__ __forceinline__ uint32_t at(size_t offset) const {
      return base + static_cast<uint32_t>(offset);
    }
    __device__ __forceinline__ uint32_t q() const { return at(offsetof(SharedStorage, q)); }
    __device__ __forceinline__ uint32_t k(int buffer) const {
      return at(offsetof(SharedStorage, k)) + buffer * KTile::kBytes;
    }
    // P of the first block of a pair has a place of its own; that of the second lies in the columns
    // beyond V of its own K, which S has read by then.
    __device__ __forceinline__ uint32_t p(int buffer) const {
      return buffer == 0 ? at(offsetof(SharedStorage, p))
                         : k(1) + (kChunks - 1) * KTile::kChunkBytes;
    }
    __device__ __forceinline__ uint32_t q_full() const {
      return at(offsetof(SharedStorage, q_full));
    }
    __device__ __forceinline__ uint32_t q_empty() const {
      return at(offsetof(SharedStorage, q_empty));
    }
    __device__ __forceinline__ uint32_t k_full(int buffer, int chunk) const {
      return at(offsetof(SharedStorage, k_full)) + 8 * (buffer * kChunks + chunk);
    }
    __device__ __forceinline__ uint32_t k_empty(int buffer, int half) const {
      return at(offsetof(SharedStorage, k_empty)) + 8 * (2 * buffer + half);
    }
    __device__ __forceinline__ uint32_t k_sent() const {
      return at(offsetof(SharedStorage, k_sent));
    }
    __device__ void init() const {
      mbarrier_init(q_full(), 1);
      mbarrier_init(q_empty(), kConsumers);
      mbarrier_init(k_sent(), 1);
      for (int buffer = 0; buffer < 2; ++buffer) {
        for (int chunk = 0; chunk < kChunks; ++chunk)
          mbarrier_init(k_full(buffer, chunk), kBringers);
        mbarrier_init(k_empty(buffer, 0), kSharers);
        // The left consumer reads P of the second block, which lies there.
        mbarrier_init(k_empty(buffer, 1), kSharers * (buffer == 0 ? 1 : kConsumers));
      }
      mbarrier_init_fence();
    }
  };
};

}  // namespace tessera::cuda::sm90
