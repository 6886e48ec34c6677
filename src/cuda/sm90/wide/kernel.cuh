// SPDX-License-Identifier: Apache-2.0
// Attention forward on Hopper for wide heads: dqk up to 576, dv up to 512.
//
// The products and the softmax are those of forward/kernel.cuh, its reference m included. But the O
// of 64 queries x 512 columns is half of a multiprocessor's registers, so that a CTA has 64 queries
// and its two consumer warpgroups share them:
//
//   S   consumer w: keys [64 w, 64 w + 64) of a block of 128
//   P   through shared memory, where both find all of it
//   O   consumer w: half w of the columns of v
//
// A cluster of two CTAs has 128 queries of one head and the same blocks of keys: each loads half of
// everything, into both. Keys and values pass through one ring of small stages in the order in
// which they are used, so that one is loaded again as soon as it has been read:
//
//   K(j)  a stage for each 64 of its columns: 128 keys
//   V(j)  a stage for each 32 of its keys and half of its columns, which one consumer reads
//
//   warpgroup 0  scheduler  one warp: the tiles
//                loader     one thread: Q, K and V by TMA
//   consumers    | QK(j) | PV(j+1) with softmax(j) in between | P(j) | QK(j-1) | ...
//
// CTAs are persistent. The scheduler of a cluster's first CTA asks for a tile and tells the
// other's.
//
//   barrier            arrivals                            says
//   q.full             1 + bytes                           the queries have arrived
//   q.empty            1 of each consumer                  they have been read
//   stages.full[s]     1 + bytes of both CTAs' copies      a stage has arrived
//   stages.empty[s]    1 of each consumer of both CTAs     it has been read in both
//   work.full[s]       1                                   a tile has been found
//   work.empty[s]      1 of the loader and of each warp    nobody looks at it any more
//                      of the consumers
//   ticket.full        1, of the first CTA                 the second one's next tile
//   ticket.empty       1, of the second CTA                it has been read
//   kMeeting           256: both consumers                 P is there; whether m must move
#pragma once

#include <cstddef>
#include <type_traits>

#include "cuda/common/element.cuh"
#include "cuda/common/score/score.cuh"
#include "cuda/sm90/forward/output.cuh"
#include "cuda/sm90/forward/params.h"
#include "cuda/sm90/forward/schedule.cuh"
#include "cuda/sm90/forward/softmax.cuh"
#include "cuda/sm90/machine/fragment.cuh"
#include "cuda/sm90/machine/pipeline.cuh"
#include "cuda/sm90/machine/ptx.cuh"
#include "cuda/sm90/machine/smem_tile.cuh"
#include "cuda/sm90/machine/wgmma.cuh"
#include "cuda/sm90/wide/kernels.h"
#include "cuda/sm90/wide/roles.cuh"

namespace tessera::cuda::sm90 {

inline constexpr NamedBarrier kMeeting{4};

template <typename Element, typename Row>
struct Wide {
  static constexpr WideTile kTile = Row::kTile;
  static constexpr int kCtas = kTile.ctas;
  static constexpr int kConsumers = 2, kLaunchRegisters = 168, kProducerRegisters = 40,
                       kConsumerRegisters = 232;
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters == 3 * kLaunchRegisters);
  static constexpr int kRows = WideTile::kRows, kTileM = kTile.tile_m();
  static constexpr int kTileN = WideTile::kTileN;  // keys a block
  static constexpr int kKeys = WideTile::kKeys;    // of a consumer
  static constexpr int kGroups = kKeys / 8;
  static constexpr int kColumns = kTile.dv / kConsumers;  // of v and o, of a consumer
  static constexpr int kValues = WideTile::kValues;       // keys a stage of v
  static constexpr int kParts = kTileN / kValues;
  static constexpr float kMostSum = 32768;  // as in forward/kernel.cuh

  using Schedule = sm90::Schedule<kTileM, kTileN>;
  using VisibleBits = sm90::VisibleBits<kKeys>;
  using QTile = SmemTile<kRows, kTile.dqk>;
  using KTile = SmemTile<kTileN, kChunkColumns>;
  using VTile = SmemTile<kValues, kColumns>;
  using PTile = SmemTile<kRows, kTileN>;
  static constexpr int kStageBytes = KTile::kBytes > VTile::kBytes ? KTile::kBytes : VTile::kBytes;
  static constexpr int kStages = kTile.stages, kWorkStages = 2;
  static_assert(kTile.dqk % kChunkColumns == 0 && kColumns % 32 == 0);
  static_assert(kKeys == kChunkColumns, "a consumer's P is one chunk");
  // P(j-1) is written where P(j+1) was while the other consumer may still be about to read that: no
  // consumer comes through a block before the other one is through with the first K stage of it.
  static_assert(kStages < 1 + kConsumers * kParts);

  struct alignas(1024) SharedStorage {
    uint8_t q[QTile::kBytes];
    uint8_t stages[kStages][kStageBytes];
    uint8_t p[2][PTile::kBytes];
    uint64_t q_barriers[2], stage_barriers[2 * kStages], work_barriers[2 * kWorkStages];
    uint64_t ticket_barriers[2];
    float maxima[kConsumers][kRows];
    int moves[kConsumers][kRows];
    float2 sums[kConsumers][kWarpgroup];
    int ticket;
    Work work[kWorkStages];
    PackedOrder order;
  };
  static_assert(sizeof(SharedStorage) <= 227 * 1024);

  // Addresses in shared memory, all from one uniform base (see uniform()).
  struct Shared {
    uint32_t base;

    __device__ __forceinline__ uint32_t q() const { return base + offsetof(SharedStorage, q); }
    __device__ __forceinline__ uint32_t stage(int stage) const {
      return base + offsetof(SharedStorage, stages) + stage * kStageBytes;
    }
    __device__ __forceinline__ uint32_t p(int buffer) const {
      return base + offsetof(SharedStorage, p) + buffer * PTile::kBytes;
    }
    __device__ __forceinline__ StageBarriers<1> q_barriers() const {
      return {base + uint32_t(offsetof(SharedStorage, q_barriers))};
    }
    __device__ __forceinline__ StageBarriers<kWorkStages> work_barriers() const {
      return {base + uint32_t(offsetof(SharedStorage, work_barriers))};
    }
    __device__ __forceinline__ StageBarriers<1> ticket_barriers() const {
      return {base + uint32_t(offsetof(SharedStorage, ticket_barriers))};
    }
    __device__ __forceinline__ uint32_t ticket() const {
      return base + uint32_t(offsetof(SharedStorage, ticket));
    }
    __device__ __forceinline__ StageBarriers<kStages> barriers() const {
      return {base + uint32_t(offsetof(SharedStorage, stage_barriers))};
    }
  };

  static __device__ __forceinline__ void consumer(const ForwardParams& a, SharedStorage& storage,
                                                  const Shared shared, const int w,
                                                  const int rank) {
    const int thread = threadIdx.x % kWarpgroup, lane = thread % kWarp;
    const int thread_row = thread / kWarp * 16 + lane / 4;  // and thread_row + 8
    const int row_of_tile = rank * kRows + thread_row;
    const bool leader = thread == 0, first_warp = uniform(thread / kWarp) == 0;
    const auto barriers = shared.barriers();
    const float c = log2_scale(a.problem);
    const int chunks = uniform(wide_chunks(a.problem.dqk));
    const bool needs_maximum = a.problem.tensor[TESSERA_MAX_LOGIT].data;

    // The tile's blocks of keys and those of them that every row sees whole.
    int begin, end, clean_begin, clean_end;
    Interval keys[2];
    float O[kColumns / 2], S[kKeys / 2];
    uint32_t P[kKeys / 4];
    float m[2], l[2], cm[2] = {}, sum[2] = {};
    Ring<kStages> ring;

    const auto release = [&](const Ring<kStages>& used) {
      if constexpr (kCtas == 1) {
        if (leader) barriers.release(used);
      } else {
        if (thread < kCtas) {
          mbarrier_arrive_in_cluster_relaxed(address_in(thread, barriers.empty(used.stage)));
        }
      }
    };
    // A stage that only the other consumer reads. The warp that releases it waits for it, no other:
    // no product holds the warps together here, and one that came late might find the stage loaded
    // once more, and wait for ever.
    const auto pass = [&](const Ring<kStages>& unread) {
      if (first_warp) barriers.wait(unread);
      release(unread);
    };
    // S = Q K^T; the last of its stages is still being read.
    const auto issue_chunk = [&](int chunk) {
      barriers.wait(ring);
      const uint64_t q = QTile::k_major(shared.q() + chunk * QTile::kChunkBytes);
      const uint64_t k = KTile::k_major(shared.stage(ring.stage) + w * kKeys * kChunkRowBytes);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < kChunkColumns / kStepK; ++step) {
        Wgmma<Element, kKeys>::template ss<kMajorK, kMajorK>(
            S, q + QTile::k_major_step(step), k + KTile::k_major_step(step), chunk + step > 0);
      }
      wgmma_commit();
    };
    const auto issue_qk = [&](bool pending, const Ring<kStages>& values_stage) {
      pin(S);
      issue_chunk(0);
      wgmma_wait<1>();
      if (pending) release(values_stage);
      Ring<kStages> before = ring;
      ring.advance();
#pragma unroll 1
      for (int chunk = 1; chunk < chunks; ++chunk) {
        issue_chunk(chunk);
        wgmma_wait<1>();
        release(before);
        before = ring;
        ring.advance();
      }
      return before;
    };
    const auto exponent = [&](float s, int r) { return fmaf(s, c, -cm[r]); };
    const auto softmax = [&](int g) {  // P of 8 keys
      float p[4];
      softmax_of_group(g, S, exponent, p, sum);
      round_group<Element>(g, p, P);
    };
    const auto store_p = [&](int buffer) {  // where both consumers find it after they have met
      const int row = thread / kWarp * 16 + lane % 16;
#pragma unroll
      for (int g = 0; g < kGroups; g += 2) {
        stmatrix_x4(PTile::unit(shared.p(buffer), row, w * kGroups + g + lane / 16), P + 2 * g);
      }
      async_proxy_fence();
    };
    const auto meet = [&] { named_barrier_sync(kMeeting, kConsumers * kWarpgroup); };
    // The rows that ask for it, in either consumer, get a reference of their own: the maximum that
    // they have seen. Rows that do not keep the bits that they had.
    const auto rescale = [&](const bool(&wants)[2], int buffer) {
      float row_max[2] = {-kInfinity, -kInfinity};
#pragma unroll
      for (int e = 0; e < kKeys / 2; ++e) row_max[e / 2 % 2] = fmaxf(row_max[e / 2 % 2], S[e]);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        row_max[r] = fmaxf(row_max[r], __shfl_xor_sync(kAllLanes, row_max[r], 2));
        row_max[r] = fmaxf(row_max[r], __shfl_xor_sync(kAllLanes, row_max[r], 1));
        const bool moves = any_of_quad(wants[r], lane);
        if (lane % 4 == 0) {
          storage.maxima[w][thread_row + 8 * r] = row_max[r];
          storage.moves[w][thread_row + 8 * r] = moves;
        }
      }
      meet();
      float alpha[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = thread_row + 8 * r;
        const bool moves = storage.moves[0][row] | storage.moves[1][row];
        const float largest = fmaxf(m[r], fmaxf(storage.maxima[0][row], storage.maxima[1][row]));
        const float next = moves ? largest : m[r];
        // A row that has seen nothing has m = -inf; any finite stand-in makes its exponentials 0.
        cm[r] = next == -kInfinity ? 0.f : next * c;
        alpha[r] = moves ? exp2_approx(fmaf(m[r], c, -cm[r])) : 1.f;
        m[r] = next;
        sum[r] = 0;
        l[r] *= alpha[r];
      }
#pragma unroll
      for (int g = 0; g < kGroups; ++g) softmax(g);
      store_p(buffer);
      meet();
#pragma unroll
      for (int e = 0; e < kColumns / 2; ++e) O[e] *= alpha[e / 2 % 2];
    };
    const auto mask = [&](int j) {  // the scores that the band leaves out
      if (j >= clean_begin && j < clean_end) return;
      VisibleBits(keys, kConsumers * j + w, lane).set_others(-kInfinity, S);
    };
    // O += P V of the block before S, whose K was read last from `keys_stage`; the weights of S are
    // made meanwhile.
    const auto pv = [&](auto with, int j, int buffer, Ring<kStages> keys_stage) {
      constexpr bool kSoftmax = decltype(with)::value;
      const uint64_t p = PTile::k_major(shared.p(buffer));
      Ring<kStages> before = keys_stage;
      pin(O);
      sum[0] = sum[1] = 0;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const auto next = ring.next();
        const Ring<kStages> own = w == 0 ? ring : next, others = w == 0 ? next : ring;
        ring = next.next();
        barriers.wait(own);
        const uint64_t v = VTile::mn_major(shared.stage(own.stage));
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kValues / kStepK; ++step) {
          Wgmma<Element, kColumns>::template ss<kMajorK, kMajorMN>(
              O, p + PTile::k_major_step(part * (kValues / kStepK) + step),
              v + VTile::mn_major_step(step), 1);
        }
        wgmma_commit();
        pass(others);
        if (part > 0 || kSoftmax) {
          wgmma_wait<1>();
          release(before);
        }
        before = own;
        if constexpr (kSoftmax) {
          if (part == 0) {
            pin(S);
            mask(j - 1);
          }
#pragma unroll
          for (int g = 0; g < kGroups / kParts; ++g) softmax(part * (kGroups / kParts) + g);
        }
      }
      if constexpr (kSoftmax) store_p(buffer ^ 1);
      return before;
    };

    const auto work_barriers = shared.work_barriers();
    const auto q_barriers = shared.q_barriers();
    Ring<1> q_ring;
    for (Ring<kWorkStages> work_ring;; work_ring.advance()) {
      work_barriers.wait(work_ring);
      const Work& work = storage.work[work_ring.stage];
      if (uniform(work.last)) return;
      begin = uniform(work.begin), end = uniform(work.end);
      clean_begin = uniform(work.clean_begin), clean_end = uniform(work.clean_end);
      keys[0] = work.band.row(work.m0 + row_of_tile);
      keys[1] = work.band.row(work.m0 + row_of_tile + 8);
      q_barriers.wait(q_ring);
      Ring<kStages> last = issue_qk(false, ring);
      wgmma_wait<0>();
      pin(S);
      release(last);
      mask(end - 1);
#pragma unroll
      for (int e = 0; e < kColumns / 2; ++e) O[e] = 0;
      m[0] = m[1] = -kInfinity;
      l[0] = l[1] = 0;
      int buffer = 0;
      rescale({true, true}, buffer);
      l[0] = sum[0], l[1] = sum[1];

#pragma unroll 1
      for (int j = end - 1; j > begin; --j) {  // P(j) is in shared memory
        last = issue_qk(j < end - 1, last);
        last = pv(std::true_type{}, j, buffer, last);
        buffer ^= 1;
        const auto wants = [&](int r) {
          return needs_maximum || !(sum[r] <= kMostSum) || m[r] == -kInfinity;
        };
        if (named_barrier_any(kMeeting, kConsumers * kWarpgroup, wants(0) || wants(1))) {
          wgmma_wait<0>();
          pin(O);
          rescale({wants(0), wants(1)}, buffer);
        }
        l[0] += sum[0], l[1] += sum[1];
      }
      wgmma_wait<0>();
      pin(O);
      if (end - begin > 1) release(last);
      if (leader) q_barriers.release(q_ring);
      q_ring.advance();
      last = pv(std::false_type{}, begin, buffer, last);
      // Both halves of the sums, in the same order in both consumers.
      storage.sums[w][thread] = float2{l[0], l[1]};
      meet();
      const float2 first = storage.sums[0][thread], second = storage.sums[1][thread];
      l[0] = first.x + second.x, l[1] = first.y + second.y;
      const Output<Element> output{a.problem, work};
      auto rows = output.finish(row_of_tile, lane, c, m, l);
      rows.o += w * kColumns;
      rows.columns[0] -= w * kColumns, rows.columns[1] -= w * kColumns;
      wgmma_wait<0>();
      pin(O);
      release(last);
      __syncwarp();
      if (lane == 0) work_barriers.release(work_ring);
      output.store(rows, lane, O);
    }
  }
};

template <typename Element, typename Row>
__global__ void __launch_bounds__(WideTile::kThreads, 1)
    wide_forward(const __grid_constant__ ForwardParams p) {
  using Kernel = Wide<Element, Row>;
  extern __shared__ __align__(1024) uint8_t storage[];
  auto& in_shared = *reinterpret_cast<typename Kernel::SharedStorage*>(storage);
  const typename Kernel::Shared shared{static_cast<uint32_t>(__cvta_generic_to_shared(storage))};
  const int warpgroup = uniform(threadIdx.x / kWarpgroup);
  const int rank = Kernel::kCtas == 1 ? 0 : blockIdx.x % Kernel::kCtas;
  launch_dependents();
  if (threadIdx.x == kWarp) {
    tma_prefetch(&p.q);
    tma_prefetch(&p.k);
    tma_prefetch(&p.v);
    shared.q_barriers().init(Kernel::kConsumers);
    shared.work_barriers().init(1 + Kernel::kConsumers * (kWarpgroup / kWarp));
    shared.ticket_barriers().init(1);
    shared.barriers().init(Kernel::kConsumers * Kernel::kCtas);
    mbarrier_init_fence();
  }
  if constexpr (Kernel::kCtas > 1) {
    cluster_sync();  // the other CTA's barriers are there
  } else {
    __syncthreads();
  }
  wait_for_predecessors();
  if (warpgroup == 0) {
    registers_release<Kernel::kProducerRegisters>();
    const int warp = uniform(threadIdx.x / kWarp);
    if (warp == 0) schedule_wide<Element, Kernel>(p, in_shared, shared, rank);
    if (warp == 1 && threadIdx.x % kWarp == 0) {
      WideLoader<Kernel>{p, shared, rank, {}}.run(in_shared.work);
    }
    __syncwarp();
  } else {
    registers_claim<Kernel::kConsumerRegisters>();
    Kernel::consumer(p, in_shared, shared, warpgroup - 1, rank);
  }
  if constexpr (Kernel::kCtas > 1) cluster_sync();  // the other CTA may still arrive here
}

template <typename Element, typename Row>
WideCode make_wide_forward() {
  return {static_cast<int>(sizeof(typename Wide<Element, Row>::SharedStorage)),
          reinterpret_cast<const void*>(&wide_forward<Element, Row>)};
}

}  // namespace tessera::cuda::sm90
