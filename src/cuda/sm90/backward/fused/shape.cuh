// SPDX-License-Identifier: Apache-2.0
// Attention backward on Hopper: dQ, dK and dV in one pass over the scores, five products.
//
//   S^T = K Q^T       dP^T = V dO^T       P^T = exp2(c S^T - lse2)       dS^T = P^T (dP^T - delta)
//   dV += P^T dO      dK += dS^T Q        dQ = sum over tiles of dS K
//
// Everything is transposed, so that a thread's P and dS are the A operands of dV and dK as they lie
// in registers. A CTA owns tile_n = 128 keys of one key head and walks the blocks of tile_m queries
// that see them, for every query head of the group: dK and dV stay in registers, GQA needs no
// second sum.
//
//   warpgroup 0     producer  one thread: Q, lse2, dO, delta of each block by TMA; others of its
//                             warps keep the order of sums, send dbias, clear sums of other heads
//   warpgroup 1, 2  owners    S, dP -> P, dS -> dV, dK of 64 keys each, and half of dQ
//
// dQ needs the dS of both owners, through shared memory, and is made one block late: an owner
// computes the dQ of block i - 1 together with its dV and dK of block i. So the owners hardly wait
// for each other, and while one computes exponentials the products of the other keep the tensor
// cores busy. dQ is added to fp32 sums in global memory while dV and dK run.
//
//   barrier        arrivals          says
//   kv             1 + bytes         K and V have arrived, where that is not said with block 0
//   q, grad_o [s]  1 + bytes         a block and its lse2 (delta) have arrived; K (V) with block 0
//   ds.full[b]     8 (a warp each)   both owners have written their rows of dS(i), and so are done
//                                    with block i - 1: its stage takes block i + 2
//   ds.empty[b]    8                 both have used them
//   added, sums    8, 1              see backward/fused/sections.cuh
//   bias, turn                       see backward/fused/dbias.cuh, backward/fused/turns.cuh
//
// Rows with products of E4M3 load more, and on other barriers: backward/fused/rounded.cuh.
//
// In this file: the shape of a kernel and its shared memory. The roles are in
// backward/fused/producer.cuh and backward/fused/owner.cuh, the kernel in
// backward/fused/kernel.cuh.
#pragma once

#include "cuda/sm90/backward/fused/dbias.cuh"
#include "cuda/sm90/backward/fused/lean.cuh"
#include "cuda/sm90/backward/fused/rounded.cuh"
#include "cuda/sm90/backward/fused/sections.cuh"
#include "cuda/sm90/backward/fused/segments.cuh"
#include "cuda/sm90/backward/fused/share.cuh"
#include "cuda/sm90/backward/fused/shared.cuh"
#include "cuda/sm90/backward/fused/turns.cuh"
#include "cuda/sm90/backward/schedule/schedule.cuh"
#include "cuda/sm90/backward/score/blocks.cuh"
#include "cuda/sm90/backward/score/features.cuh"
#include "cuda/sm90/machine/smem_tile.cuh"

namespace tessera::cuda::sm90 {

// Row: one row of the table in backward/table.def, as a type with the constants kTile and
// kFeatures.
template <typename Element, typename Row>
struct Backward {
  static constexpr BackwardTile kTile = Row::kTile;
  static constexpr uint32_t kFeatures = Row::kFeatures;

  // ---- what this kernel does ----

  static constexpr bool kShapes = kFeatures & kEverything;  // scores, beyond the band
  // dK and dV leave by TMA, and dS is k-major for the products of dQ.
  static constexpr bool kLean = kIsLean<Row>;
  static constexpr bool kRich = kShapes && !kLean;
  static constexpr bool kOfFp8 = kTile.fp8;  // S and dP are products of E4M3
  static constexpr bool kOfSegments = kIsOfSegments<Row>;
  static constexpr bool kLeavesOut = kOfSegments || kFeatures & kMasks;  // blocks
  static constexpr bool kPassesTurns = kInTurn<Row>;
  static constexpr bool kSendsBias = kSumsBias<Row>;
  // Sums are cleared and converted by tiles (backward/fused/sections.cuh).
  static constexpr bool kInSections = is_plain(kTile, kFeatures),
                        kConverts = kInSections && tiles_convert(kTile);
  // Several CTAs may share a tile (backward/fused/share.cuh).
  static constexpr bool kShares = can_share(kTile, kFeatures);
  // The producer says of each stage which block it holds, and how that is masked.
  static constexpr bool kIsTold = kRich || kOfSegments;
  static constexpr int kStagedBits = kOfSegments ? int{kRuleBits} : 2;
  // dK and dV leave no room for S beside dP: P is rounded before dP is made, and dQ follows dV.
  static constexpr bool kWide = kTile.dqk > 128;
  // All heads of a group pass at one block of queries if tiles are in step: what the tiles of a key
  // head read and add to then stays in L2, large as a group is. Else one after the other does.
  static constexpr InnerLoop kInnerLoop = swaps_loops(kTile, kFeatures) ? InnerLoop::kEither
                                          : kWide                       ? InnerLoop::kHeads
                                                                        : InnerLoop::kBlocks;
  // The thread that finds the tile asks for K, V and the first block at once. It was slower in the
  // deterministic form, where a ticket comes late as it is. Features leave no registers for it.
  static constexpr bool kStartsEarly = !kIsTold && !kInTurn<Row>;
  // The fence for dS behind the issue of dQ, as in the lean step: others are slower with it.
  static constexpr bool kFencesLate =
      kFeatures == kDropout ||
      (kFeatures == kBias && kTile.dqk > 64 && !kInTurn<Row> && !kSumsBias<Row>);

  // ---- shapes ----

  static constexpr int kTileM = kTile.tile_m, kTileN = kTile.tile_n();
  static constexpr int kOwners = BackwardTile::kOwners, kOwnerWarps = 4 * kOwners;
  using QTile = SmemTile<kTileM, kTile.dqk>;
  using GradOTile = SmemTile<kTileM, kTile.dv>;
  using KTile = SmemTile<kTileN, kTile.dqk>;
  using VTile = SmemTile<kTileN, kTile.dv>;
  using GradientTile =  // dS or dS^T
      std::conditional_t<kLean, SmemTile<kTileM, kTileN>, SmemTile<kTileN, kTileM>>;
  // As bytes, which are mapped in pairs (machine/wgmma_fp8.cuh).
  using Q8Tile = SmemTile<kTileM, kTile.dqk / 2>;
  using GradO8Tile = SmemTile<kTileM, kTile.dv / 2>;
  using K8Tile = SmemTile<kTileN, kTile.dqk / 2>;
  using V8Tile = SmemTile<kTileN, kTile.dv / 2>;
  // Q in 16 bits comes with dO where a stage of Q is of E4M3, and each statistic of a query with a
  // factor.
  static constexpr int kStages = 3, kGradOStages = kTile.grad_o_stages,
                       kQStages = kOfFp8 ? kGradOStages : kStages, kStatistics = kOfFp8 ? 2 : 1;
  static constexpr int kRoundedBytes = Q8Tile::kBytes + GradO8Tile::kBytes,  // of a stage
      kBytesOfE4m3 = V8Tile::kBytes + K8Tile::kBytes + kStages * kRoundedBytes;
  static constexpr int kGradientBuffers = kTile.ds_buffers;
  static constexpr bool kWaitsForEmpty = kGradientBuffers < 3;
  // What the roles claim is what the CTA was launched with: 3 x 168 registers.
  static constexpr int kProducerRegisters = 24, kOwnerRegisters = 240;
  // k16 steps of K that an owner holds in registers: as many as there are.
  static constexpr int kKeySteps = kShapes || kOfFp8    ? 0
                                   : kTile.dqk == 96    ? 6
                                   : kTile.dqk == 128   ? 5
                                   : kTile.tile_m == 64 ? 4
                                                        : 2;

  // An owner makes 64 queries x 64 or 32 columns of a block of dQ: half of its rows or half of its
  // columns. Element 4 i + j of a thread's accumulators lies at 4 (128 i + thread) + j of its part:
  // warps add whole lines.
  static constexpr bool kSplitsRows = kTileM == 128;
  static constexpr int kColumnsOfDq = kTile.columns_of_dq(), kPartsOfDq = kTile.parts_of_dq();
  static constexpr int kPartOfDq = 64 * kColumnsOfDq, kBlockOfDq = kTile.sums_of_dq();
  // An owner makes one of three chunks of 64 columns, and half of the middle one.
  static constexpr int kHalfColumns = 32;
  // Bytes from the columns of K that dQ of one owner is made of to those of the other.
  static constexpr uint32_t kOtherColumns = kWide                ? 2 * KTile::kChunkBytes
                                            : kColumnsOfDq == 64 ? KTile::kChunkBytes
                                                                 : kColumnsOfDq * 2;

  // ---- who finds blocks, shapes scores and keeps the order ----

  using Schedule = KeySchedule<kTileM, kTileN>;
  using Blocks = QueryBlocks<kTileM, kTileN, kOfSegments>;
  using SegmentsOf = Segments<kTileM, kTileN>;
  using Features = BackwardFeatures<Element, kTileM, kFeatures, kInTurn<Row>>;
  using Order =
      Turns<kTileM, kTileN, kOwnerWarps, kLeavesOut, kInnerLoop, kGradientBuffers, kOfSegments>;
  struct Spans {
    Interval spans[kLeavesOut ? kTileN : 1];  // of queries, of each key; see QueryBlocks::span
  };
  using MasksOfTile = std::conditional_t<kOfSegments, typename SegmentsOf::OfTile, Spans>;
  static constexpr int kPieces = kTileM / kMaskPiece;                   // of a packed mask
  static constexpr int kMaskBytes = kPieces * kOwnerWarps * kWarp * 4;  // of a block

  struct alignas(1024) SharedStorage {
    uint8_t k[KTile::kBytes], v[kOfFp8 ? kBytesOfE4m3 : VTile::kBytes];
    uint8_t q[kQStages][QTile::kBytes];
    uint8_t grad_o[kGradOStages][GradOTile::kBytes];
    uint8_t ds[kGradientBuffers][GradientTile::kBytes];
    uint8_t bias_sums[kSumsBias<Row> ? kOwners : 1][kSumsBias<Row> ? 64 * kTileM * 2 : 16];
    float lse2[kStages][kStatistics * kTileM], delta[kGradOStages][kStatistics * kTileM];
    uint64_t kv_barrier, q_barriers[kStages], grad_o_barriers[kGradOStages];
    uint64_t ds_barriers[2 * kGradientBuffers];
    uint64_t added_barrier;  // both owners have added all of dQ
    uint64_t sums_barrier;   // of the head that this tile converts a part of are complete
    uint64_t bias_barriers[kOwners][2];        // full and empty, see backward/fused/dbias.cuh
    uint64_t turn_barriers[Order::kBarriers];  // deterministic: see backward/fused/turns.cuh
    int turn_stored[Order::kRing];
    int2 blocks[kStages];  // told: the StagedBlock of each
    alignas(16) uint8_t mask[kStages][kLeavesOut && !kOfSegments ? kMaskBytes : 16];  // packed
    MasksOfTile masks;
    KeyTile tile;
  };
  static_assert(sizeof(SharedStorage) <= 227 * 1024);
  static_assert(!Features::kFetchesBias || kGradientBuffers == 3);
  static_assert(!kSumsBias<Row> || kTileM == 64);
  static_assert(kSplitsRows ? kTile.dqk == 64 : kTileM == 64 && kTile.dqk <= 192);
  static_assert(kWide ? kTile.dqk == 192 && !kRich : kGradOStages == kStages || kOfFp8);
  static_assert(!kOfFp8 || (is_plain(kTile, kFeatures) && kTile.dqk == kTile.dv && !kSplitsRows));
  static_assert(!kOfFp8 || (kTileN == kKeysOfScale && K8Tile::kChunks == 1));
  static_assert(kGradOStages == kStages || kGradOStages == kStages - 1);
  static_assert(kTile.dqk % 32 == 0 && kTile.dv % 32 == 0);

  using Shared = BackwardShared<Backward>;
  using Args = std::conditional_t<kOfFp8, RoundedBackwardParams, BackwardParams>;

  // {first block, step} of a walk: by the turn of a tile in a deterministic kernel, upwards where
  // masks leave blocks out, else as the schedule says.
  static __device__ __forceinline__ int2 walk_of(const KeyTile& tile) {
    if constexpr (kInTurn<Row>) return Order::walk_of(tile);
    if constexpr (kLeavesOut) return {tile.begin, 1};
    return tile.descends ? int2{tile.end - 1, -1} : int2{tile.begin, 1};
  }
};

}  // namespace tessera::cuda::sm90
