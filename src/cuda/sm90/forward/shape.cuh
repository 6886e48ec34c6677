// SPDX-License-Identifier: Apache-2.0
// What a row of forward/table.def makes of the forward kernel (forward/kernel.cuh): its constants
// and types, and where its things are in shared memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <type_traits>

#include "cuda/sm90/forward/frame.cuh"
#include "cuda/sm90/forward/pages/params.h"
#include "cuda/sm90/forward/schedule.cuh"
#include "cuda/sm90/forward/score/alibi.cuh"
#include "cuda/sm90/forward/score/bias.cuh"
#include "cuda/sm90/forward/score/blocks.cuh"
#include "cuda/sm90/forward/score/features.cuh"
#include "cuda/sm90/forward/tile.h"
#include "cuda/sm90/machine/fragment.cuh"
#include "cuda/sm90/machine/pipeline.cuh"
#include "cuda/sm90/machine/smem_tile.cuh"

namespace tessera::cuda::sm90 {

// Row: a row of forward/table.def, as a type with the constants kTile and kFeatures.
template <typename Element, typename Row>
struct Forward {
  static constexpr ForwardTile kTile = Row::kTile;
  static constexpr uint32_t kFeatures = Row::kFeatures;
  // Data masks may leave out blocks between a tile's first and last one: it comes with a list.
  static constexpr bool kListsBlocks = kFeatures & kMasks;
  // What kernels of one feature do with the registers that they have to spare. Dropout: draws a
  // block's mask between products (EarlyDropout). Masks: loads those of a block before its
  // products. Softcap: caps a score as part of its exponent (LateSoftcap). ALiBi: lets products add
  // it (Progression).
  static constexpr bool kDrawsEarly = kFeatures == kDropout, kMasksEarly = kFeatures == kMasks,
                        kCapsLate = kFeatures == kSoftcap, kAddsByProducts = kFeatures == kAlibi;
  // Where the bytes of an E4M3 K and V come to, two blocks of each, before they are converted.
  static constexpr int kRawBytes = kTile.e4m3 ? kTile.tile_n * kTile.dqk : 0;
  using Arguments = std::conditional_t<kTile.pages, PagedForwardParams,
                                       std::conditional_t<kTile.parts, PartsParams, ForwardParams>>;
  using Result = std::conditional_t<kTile.parts, float, Element>;  // of o
  static constexpr int kTileM = kTile.tile_m(), kTileN = kTile.tile_n;
  static constexpr int kConsumers = kTile.consumers;
  static constexpr int kLoaders = 3;
  static constexpr int kRows = 64;  // of a consumer
  static constexpr int kGroups = kTileN / 8;
  static constexpr int kProducerRegisters = kTile.producer_registers(),
                       kConsumerRegisters = kTile.consumer_registers();

  // Finds out what the next tile's rows see while this one's last products run. Other kernels have
  // no registers left for it.
  static constexpr bool kLooksAhead = !(kFeatures & ~(kMasks | kAlibi)) && kTile.dv < 256;

  // Three loops over blocks, cut, clean and cut again, instead of one with a branch. The kernel of
  // bias gains nothing by it (docs/lab/2026-11-22-sm90-features.md).
  static constexpr bool kSplitsLoop = kFeatures == 0 || kCapsLate || kDrawsEarly;
  // One loop with two bodies, for clean blocks and others, where registers allow and mixtures gain
  // by it.
  static constexpr bool kSplitsBody =
      kListsBlocks && (kTile.loads_bias ? kTile.dqk == 128 : kTile.dqk == 64);

  // Tiles that the scheduler describes ahead: three, or what fits beside lists and a bias.
  static constexpr int kWorkStages = kListsBlocks && kFeatures & kBias ? 2 : 3;
  static constexpr int kBiasBytes = kFeatures & kBias ? kRows * kTileN * 2 : 0;  // a consumer
  // The weights of these groups of 8 keys wait in fp32, in registers of their own, until PV has
  // read the P before.
  static constexpr int kEarlyGroups = kTile.early_groups > 0 ? kTile.early_groups : 2;
  // The most that a thread's weights of a row and block may add up to; beyond it m moves. None of
  // them is infinite in fp16 then.
  static constexpr float kMostSum = 32768;

  using BlockFeatures = Features<Element, kTileN, kFeatures, kTile.loads_bias>;
  using Progression = sm90::Progression<Element, kTileM, kTileN>;
  using Schedule = sm90::Schedule<kTileM, kTileN, kTile.heads>;
  using PlainWork = std::conditional_t<kAddsByProducts, PivotedWork,
                                       std::conditional_t<kTile.e4m3, ScaledWork, sm90::Work>>;
  using Work = std::conditional_t<kMasksEarly, SpannedWork,
                                  std::conditional_t<kListsBlocks, ListedWork, PlainWork>>;
  using VisibleBits = sm90::VisibleBits<kTileN>;
  using QTile = SmemTile<kRows, kTile.dqk>;
  using KTile = SmemTile<kTileN, kTile.dqk>;
  using VTile = SmemTile<kTileN, kTile.dv>;

  struct alignas(1024) SharedStorage {
    uint8_t q[kConsumers][kTile.q_stages][QTile::kBytes];
    uint8_t k[kTile.k_stages][KTile::kBytes];
    uint8_t v[kTile.v_stages][VTile::kBytes];
    // A bias, or the bytes of E4M3: two blocks of K and two of V.
    alignas(16) uint8_t bias[std::max(std::max(kConsumers * kBiasBytes, 4 * kRawBytes), 8)];
    alignas(16) uint8_t indices[kAddsByProducts ? Progression::kIndexBytes : 8];
    alignas(16) uint8_t slopes[kAddsByProducts ? kWorkStages * Progression::kSlopeBytes : 8];
    uint64_t q_barriers[kConsumers][2 * kTile.q_stages];
    uint64_t k_barriers[2 * kTile.k_stages], v_barriers[2 * kTile.v_stages];
    uint64_t bias_barriers[kConsumers][2], work_barriers[2 * kWorkStages];
    Work work[kWorkStages];
    PackedOrder order;
    int blocks_loaded;  // of K since the kernel began: how far load_keys() is, for schedule()
  };
  static_assert(!kTile.loads_bias || (kFeatures & kBias && kFeatures != kBias));
  // Features know one head of a tile, and no pages; a warp's 16 rows are one head's.
  static_assert((kTile.heads == 1 || (kTile.heads % kConsumers == 0 && !kFeatures)) &&
                kTileM % 16 == 0 && (kTile.heads <= kConsumers || !kTile.o_by_tma) &&
                !((kTile.pages || kTile.parts) && kFeatures));
  static_assert(!kTile.parts || !kTile.o_by_tma);
  static_assert(!kTile.e4m3 || (kTile.pages && !kTile.parts && kTile.dqk == kTile.dv));
  static_assert(kTile.dqk % kStepK == 0 && kTile.dv % 32 == 0 && kTileN % kStepK == 0);
  static_assert(sizeof(SharedStorage) <= 227 * 1024);
  // o takes the place of its tile's queries, whole chunks of them, and those of the next tile have
  // another: they must not wait for o.
  static_assert(!kTile.o_by_tma || (kTile.q_stages == 2 && !kTile.q_in_registers &&
                                    QTile::kBytes == kRows * kTile.dv * 2));

  struct Shared : SharedRings<Forward, SharedStorage> {
    using SharedRings<Forward, SharedStorage>::base;

    __device__ __forceinline__ BiasStage<kTileN> bias(int consumer) const {
      return {base + uint32_t(offsetof(SharedStorage, bias)) + consumer * kBiasBytes,
              {base + uint32_t(offsetof(SharedStorage, bias_barriers)) + consumer * 16},
              {}};
    }
    // of: 0 for K, 1 for V
    __device__ __forceinline__ uint32_t raw(int of, int buffer) const {
      return base + offsetof(SharedStorage, bias) + (2 * of + buffer) * kRawBytes;
    }
    __device__ __forceinline__ uint32_t indices() const {
      return base + offsetof(SharedStorage, indices);
    }
    __device__ __forceinline__ uint32_t slopes(int stage) const {
      return base + offsetof(SharedStorage, slopes) + stage * Progression::kSlopeBytes;
    }
  };

  // A consumer warpgroup, w = 0, 1, ... (forward/consumer.cuh). works: the ring of tiles.
  static __device__ __forceinline__ void consumer(const ForwardParams& a, const Work* works,
                                                  const Shared shared, const int w);

 private:
  // What a loop over blocks knows of the block that it does. Constants in most loops, so that each
  // has no code but what its blocks need.
  struct Kind {
    bool cut = false;      // the band hides some of its scores
    bool partial = false;  // data masks may hide some
    bool listed = false;   // the next block is to be looked up in the tile's list meanwhile
    bool dense = false;    // a dense mask hides some and nothing else does; its words are loaded
    bool linear = false;   // ALiBi comes with the products: nothing is left to do to the scores
    bool right = false;    // of the diagonal, where it is subtracted
  };
};

}  // namespace tessera::cuda::sm90
