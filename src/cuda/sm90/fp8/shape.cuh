// SPDX-License-Identifier: Apache-2.0
// What a row of fp8/table.def makes of the fp8 forward kernel (fp8/kernel.cuh): its constants and
// types, and where its things are in shared memory. Element: the 16-bit type of o.
#pragma once

#include <cstddef>
#include <type_traits>

#include "cuda/common/element.cuh"
#include "cuda/sm90/forward/frame.cuh"
#include "cuda/sm90/forward/output.cuh"
#include "cuda/sm90/forward/schedule.cuh"
#include "cuda/sm90/forward/score/features.cuh"
#include "cuda/sm90/fp8/params.h"
#include "cuda/sm90/fp8/softmax.cuh"
#include "cuda/sm90/fp8/tile.h"
#include "cuda/sm90/machine/pipeline.cuh"
#include "cuda/sm90/machine/smem_tile.cuh"

namespace tessera::cuda::sm90 {

// The scale of head `head` of sequence n, for the rows of block `block`; 1 where none is given.
__device__ __forceinline__ float scale_of(const View& scales, int n, int head, int block = 0) {
  if (!scales.data) return 1;
  return static_cast<const float*>(scales.data)[offset_of(scales, n, head, block)];
}

// The ratio of two powers of two, as far as a float has it.
__device__ __forceinline__ float ratio_of_powers(float a, float b) {
  constexpr int kOne = 127 << 23, kMost = 126 << 23;
  const int difference = __float_as_int(a) - __float_as_int(b);
  return __int_as_float(kOne + min(max(difference, -kMost), kMost));
}

template <typename Element, typename Row>
struct Fp8Forward {
  static constexpr Fp8Tile kTile = Row::kTile;
  static constexpr uint32_t kFeatures = kLean;
  static constexpr bool kListsBlocks = false, kAddsByProducts = false;
  static constexpr bool kByBlocks = kTile.by_blocks;
  static constexpr int kTileM = kTile.tile_m(), kTileN = kTile.tile_n;
  static_assert(!kByBlocks || kTileN == kKeysOfScale);
  static constexpr int kConsumers = kTile.consumers, kThreads = kTile.threads();
  static constexpr int kProducerRegisters = kTile.producer_registers(),
                       kConsumerRegisters = kTile.consumer_registers();
  static constexpr int kLoaders = 3, kRows = 64;
  static constexpr int kGroups = kTileN / 8, kWorkStages = 3, kBiasBytes = 0;
  // Bytes of a row of 16-bit columns; see machine/wgmma_fp8.cuh.
  static constexpr int kStepBytes = 32, kPair = 2;
  // Under V^T stand a row of ones, whose products are the sums of the rounded P, and seven of zeros.
  static constexpr int kSumRows = kTile.exact_sum ? 0 : 8;
  static constexpr int kColumns = kTile.dv + kSumRows, kAccumulators = kColumns / 2;
  // Groups of 8 keys whose weights wait in fp32 until PV has read the P before.
  static constexpr int kEarlyGroups = 8;

  using BlockFeatures = Features<Element, kTileN, kLean, false>;
  using Schedule = sm90::Schedule<kTileM, kTileN>;
  using Work = sm90::Work;
  using QTile = SmemTile<kRows, kTile.dqk / kPair>;
  using KTile = SmemTile<kTileN, kTile.dqk / kPair>;
  using VTile = SmemTile<kTile.dv, kTileN / kPair>;
  using Weights = std::conditional_t<kTile.exact_sum, ExactWeights, LinearWeights>;
  static constexpr int kSumBytes = kSumRows * kChunkRowBytes;

  struct alignas(1024) SharedStorage {
    uint8_t q[kConsumers][kTile.q_stages][QTile::kBytes];
    uint8_t k[kTile.k_stages][KTile::kBytes];
    uint8_t v[kTile.v_stages][VTile::kBytes + kSumBytes];
    uint64_t q_barriers[kConsumers][2 * kTile.q_stages];
    uint64_t k_barriers[2 * kTile.k_stages], v_barriers[2 * kTile.v_stages];
    uint64_t work_barriers[2 * kWorkStages];
    Work work[kWorkStages];
    PackedOrder order;
    int blocks_loaded;  // of K since the kernel began: how far load_keys() is, for schedule()
  };
  static_assert(sizeof(SharedStorage) <= 227 * 1024);
  static_assert(VTile::kChunks == 1 && kTile.k_stages == kTile.v_stages);

  using Shared = SharedRings<Fp8Forward, SharedStorage>;

  // A consumer warpgroup, w = 0, 1, ... (fp8/consumer.cuh). works: the ring of tiles.
  static __device__ __forceinline__ void consumer(const Fp8Params& a, const Work* works,
                                                  const Shared shared, const int w);

  // The row of ones and those of zeros under each stage of V^T, by all threads.
  static __device__ __forceinline__ void fill_sum_rows(uint8_t* storage) {
    constexpr uint32_t kOnes = 0x38383838;  // E4M3
    constexpr int kWords = kSumBytes / 4, kOnesWords = kChunkRowBytes / 4;
    for (int i = threadIdx.x; i < kTile.v_stages * kWords; i += kThreads) {
      uint8_t* const rows = reinterpret_cast<SharedStorage*>(storage)->v[i / kWords];
      const int word = i % kWords;
      reinterpret_cast<uint32_t*>(rows + VTile::kBytes)[word] = word < kOnesWords ? kOnes : 0;
    }
    async_proxy_fence();
  }

  // V^T, a box a block.
  static __device__ __forceinline__ void load_values(const Fp8Params& a, const Work* works,
                                                     const Shared shared);

 private:
  // The largest |o| of the rows of a warp that have some; the bits of a positive float grow with it,
  // and those of NaN are above all.
  static __device__ __forceinline__ void raise_amax(const float (&factor)[2],
                                                    const float (&O)[kTile.dv / 2],
                                                    uint32_t* amax) {
    uint32_t largest = 0;
#pragma unroll
    for (int e = 0; e < kTile.dv / 2; ++e) {
      const float row = factor[e / 2 % 2];
      if (row != 0) largest = max(largest, __float_as_uint(O[e] * row) & 0x7fffffff);
    }
    largest = __reduce_max_sync(kAllLanes, largest);
    if (threadIdx.x % kWarp == 0) atomicMax(amax, largest);
  }
};

}  // namespace tessera::cuda::sm90
