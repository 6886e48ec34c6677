// SPDX-License-Identifier: Apache-2.0
// Attention forward on Hopper.
//
//   S = Q K^T                        64 queries a warpgroup x tile_n keys, fp32 accumulators
//   m' = max(m, rowmax S)            visible keys only
//   P = exp2(c S - c m')             c = softmax_scale * log2(e)
//   l = l exp2(c m - c m') + rowsum P
//   O = O exp2(c m - c m') + P V     P rounded to 16 bits and kept in registers
//   o = O / l,  lse = (c m + log2 l) / log2(e)
//
// q [b, sq, hq, dqk], k [b, sk, hk, dqk], v [b, sk, hk, dv], o [b, sq, hq, dv], lse [b, hq, sq];
// any strides. A CTA is persistent and computes row tiles of tile_m queries of one head:
//
//   warpgroup 0  producer    one thread: Q, then K(j) and V(j) by TMA, j from right to left
//   warpgroup 1  consumer 0  |QK(j) PV(j-1)|   softmax(j)    |QK(j+1) PV(j)| ...
//   warpgroup 2  consumer 1     softmax(j-1) |QK(j) PV(j-1)|   softmax(j)   | ...
//
// The consumers take turns on the tensor cores: issuing a step's products takes about as long as
// executing them, so what overlaps with a softmax are the products of the other warpgroup. Keys run
// right to left, so that masked blocks come first and the steady loop has no mask code. At the end
// of a tile the first product of the next one is issued with the last of this one, so that the
// tensor cores do not see where tiles end; o leaves from registers.
//
//   barrier               arrivals                       says
//   q[w].full[s]          1 + bytes                      64 queries of consumer w have arrived
//   q[w].empty[s]         4 (a warp each)                consumer w has read them
//   k.full[s], v.full[s]  1 + bytes                      a block has arrived
//   k.empty, v.empty[s]   1 of each consumer             a block has been used
//   turn(w)               256: consumer w and the one    consumer w may issue products
//                         before it
#pragma once

#include <cmath>
#include <cstddef>

#include "cuda/sm90/params.h"
#include "cuda/sm90/pipeline.cuh"
#include "cuda/sm90/ptx.cuh"
#include "cuda/sm90/smem_tile.cuh"
#include "cuda/sm90/tiles.h"
#include "cuda/sm90/wgmma.cuh"

namespace tessera::cuda::sm90 {

// Row: a type with a static constexpr ForwardTile kTile, one row of the table in tiles.h.
template <typename Element, typename Row>
struct Forward {
  static constexpr ForwardTile kTile = Row::kTile;
  static constexpr int kTileM = kTile.tile_m(), kTileN = kTile.tile_n;
  static constexpr int kConsumers = kTile.consumers;
  static constexpr int kRows = 64;  // of a consumer
  static constexpr int kGroups = kTileN / 8;
  static constexpr int kWordsPerRow = (kTileN / 4 + 31) / 32;  // of visibility bits a thread holds
  static constexpr int kFirstTurnBarrier = 1;                  // 0 is __syncthreads
  static constexpr int kProducerRegisters = kConsumers == 2 ? 24 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 240 : 160;
  static constexpr float kInfinity = INFINITY;
  static constexpr float kLn2 = 0.6931471805599453f;

  using QTile = SmemTile<kRows, kTile.dqk>;
  using KTile = SmemTile<kTileN, kTile.dqk>;
  using VTile = SmemTile<kTileN, kTile.dv>;

  struct alignas(1024) SharedStorage {
    uint8_t q[kConsumers][kTile.q_stages][QTile::kBytes];
    uint8_t k[kTile.stages][KTile::kBytes];
    uint8_t v[kTile.stages][VTile::kBytes];
    uint64_t q_barriers[kConsumers][2 * kTile.q_stages];
    uint64_t k_barriers[2 * kTile.stages], v_barriers[2 * kTile.stages];
  };
  static_assert(kTile.dqk % kStepK == 0 && kTile.dv % 32 == 0 && kTileN % kStepK == 0);
  static_assert(sizeof(SharedStorage) <= 227 * 1024);

  // Addresses in shared memory, all from one uniform base (see uniform()).
  struct Shared {
    uint32_t base;

    __device__ __forceinline__ uint32_t q(int consumer, int stage) const {
      return base + offsetof(SharedStorage, q) +
             (consumer * kTile.q_stages + stage) * QTile::kBytes;
    }
    __device__ __forceinline__ uint32_t k(int stage) const {
      return base + offsetof(SharedStorage, k) + stage * KTile::kBytes;
    }
    __device__ __forceinline__ uint32_t v(int stage) const {
      return base + offsetof(SharedStorage, v) + stage * VTile::kBytes;
    }
    __device__ __forceinline__ StageBarriers<kTile.q_stages> q_barriers(int consumer) const {
      return {base + uint32_t(offsetof(SharedStorage, q_barriers)) +
              consumer * 16 * kTile.q_stages};
    }
    __device__ __forceinline__ StageBarriers<kTile.stages> k_barriers() const {
      return {base + uint32_t(offsetof(SharedStorage, k_barriers))};
    }
    __device__ __forceinline__ StageBarriers<kTile.stages> v_barriers() const {
      return {base + uint32_t(offsetof(SharedStorage, v_barriers))};
    }
  };

  // ---- schedule ----

  // Keys [lo, hi) of a query, never decreasing with the row.
  struct Keys {
    int lo, hi;
  };

  // One row tile: where it is, and the blocks of keys that some query of it sees. There is always at
  // least one block, if need be a wholly masked one. Blocks in [clean_begin, clean_end) are seen
  // whole by every row.
  struct Work {
    int batch, head, m0;
    int len_q, len_k, shift;
    int begin, end, clean_begin, clean_end;

    __device__ __forceinline__ Keys row(const ForwardParams& p, int i) const {
      const int diagonal = i + shift;
      Keys keys{0, len_k};
      if (p.left >= 0) keys.lo = min(max(diagonal - p.left, 0), len_k);
      if (p.right >= 0) keys.hi = min(max(diagonal + p.right + 1, 0), len_k);
      return keys;
    }
  };

  // The i-th tile of this CTA; false past the last. Causal problems run longest tile first, each
  // round of the grid in the opposite order of the one before, which evens out the sums.
  static __device__ __forceinline__ bool work_at(const ForwardParams& p, int i, Work& work) {
    const bool reverse = p.longest_first && (i & 1);
    const int index =
        i * gridDim.x + (reverse ? gridDim.x - 1 - blockIdx.x : static_cast<unsigned>(blockIdx.x));
    if (index >= p.tiles) return false;
    int m, x;
    if (p.longest_first) {
      const int per_section = p.heads_per_section * p.tiles_m;
      const int section = index / per_section, r = index % per_section;
      const int first = section * p.heads_per_section;
      const int heads = min(p.heads_per_section, p.batch * p.heads_q - first);
      m = p.tiles_m - 1 - r / heads;
      x = first + r % heads;
    } else {
      m = index % p.tiles_m;
      x = index / p.tiles_m;
    }
    work.head = x % p.heads_q;
    work.batch = x / p.heads_q;
    work.m0 = m * kTileM;
    work.len_q = p.sq;
    work.len_k = p.sk;
    work.shift = p.bottom_right ? work.len_k - work.len_q : 0;
    const Keys top = work.row(p, work.m0);
    const Keys bottom = work.row(p, min(work.m0 + kTileM, work.len_q) - 1);
    work.begin = top.lo / kTileN;
    work.end = max((bottom.hi + kTileN - 1) / kTileN, work.begin + 1);
    work.clean_begin = (bottom.lo + kTileN - 1) / kTileN;
    work.clean_end = top.hi / kTileN;
    return true;
  }

  // ---- producer ----

  static __device__ __forceinline__ void producer(const ForwardParams& p, const Shared shared) {
    const auto k_barriers = shared.k_barriers(), v_barriers = shared.v_barriers();
    Ring<kTile.q_stages> q_ring;
    Ring<kTile.stages> ring;
    Work work;
    for (int i = 0; work_at(p, i, work); ++i) {
      const int kv_head = work.head / p.group;
#pragma unroll 1
      for (int j = work.end - 1; j >= work.begin; --j) {
        k_barriers.acquire(ring, KTile::kBytes);
        KTile::load(shared.k(ring.stage), &p.k, k_barriers.full(ring.stage), kv_head, j * kTileN, 0,
                    work.batch);
        if (j == work.end - 1) {
          for (int w = 0; w < kConsumers; ++w) {
            const auto q_barriers = shared.q_barriers(w);
            q_barriers.acquire(q_ring, QTile::kBytes);
            QTile::load(shared.q(w, q_ring.stage), &p.q, q_barriers.full(q_ring.stage), work.head,
                        work.m0 + w * kRows, 0, work.batch);
          }
          q_ring.advance();
        }
        v_barriers.acquire(ring, VTile::kBytes);
        VTile::load(shared.v(ring.stage), &p.v, v_barriers.full(ring.stage), kv_head, j * kTileN, 0,
                    work.batch);
        ring.advance();
      }
    }
  }

  // ---- consumer ----

  static __device__ __forceinline__ void consumer(const ForwardParams& p, const Shared shared,
                                                  const int w) {
    const int thread = threadIdx.x % kWarpgroup, lane = thread % kWarp;
    const int thread_row = thread / kWarp * 16 + lane / 4;  // and thread_row + 8
    const bool leader = thread == 0;
    const auto q_barriers = shared.q_barriers(w);
    const auto k_barriers = shared.k_barriers(), v_barriers = shared.v_barriers();
    const float c = p.scale_log2;

    float O[kTile.dv / 2], S[kTileN / 2];
    uint32_t P[kTileN / 4], Q[kTile.q_in_registers ? kTile.dqk / 4 : 1];
    float m[2] = {}, l[2] = {}, alpha[2], cm[2];  // of the thread's two rows; cm = c m

    Ring<kTile.q_stages> q_ring;
    Ring<kTile.stages> ring;  // of the block whose S is in registers

    const auto take_turn = [&] { named_barrier_sync(kFirstTurnBarrier + w, 2 * kWarpgroup); };
    const auto give_turn = [&] {
      named_barrier_arrive(kFirstTurnBarrier + (w + 1) % kConsumers, 2 * kWarpgroup);
    };
    const auto release_q = [&] {
      __syncwarp();
      if (lane == 0) q_barriers.release(q_ring);
    };
    const auto load_q = [&] {
      q_barriers.wait(q_ring);
      if constexpr (kTile.q_in_registers) {
        QTile::load_a(shared.q(w, q_ring.stage), 0, thread, Q);
        release_q();
        q_ring.advance();
      }
    };
    const auto issue_qk = [&](int stage) {  // S = Q K^T
      const uint64_t k = KTile::k_major(shared.k(stage));
      const uint64_t q = QTile::k_major(shared.q(w, q_ring.stage));
      pin(S);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < kTile.dqk / kStepK; ++step) {
        if constexpr (kTile.q_in_registers) {
          Wgmma<Element, kTileN>::template rs<kMajorK>(S, Q + 4 * step, k + KTile::k_major_step(step),
                                                       step > 0);
        } else {
          Wgmma<Element, kTileN>::template ss<kMajorK, kMajorK>(
              S, q + QTile::k_major_step(step), k + KTile::k_major_step(step), step > 0);
        }
      }
      wgmma_commit();
    };
    const auto issue_pv = [&](int stage, int accumulate) {  // O += P V
      const uint64_t v = VTile::mn_major(shared.v(stage));
      pin(O);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < kTileN / kStepK; ++step) {
        Wgmma<Element, kTile.dv>::template rs<kMajorMN>(
            O, P + 4 * step, v + VTile::mn_major_step(step), step > 0 ? 1 : accumulate);
      }
      wgmma_commit();
    };
    const auto row_max = [&] {  // m' and what the old terms shrink by; both rows side by side
      float a0 = S[0], b0 = S[1], a1 = S[2], b1 = S[3];
#pragma unroll
      for (int g = 1; g < kGroups; ++g) {
        a0 = fmaxf(a0, S[4 * g]), b0 = fmaxf(b0, S[4 * g + 1]);
        a1 = fmaxf(a1, S[4 * g + 2]), b1 = fmaxf(b1, S[4 * g + 3]);
      }
      float row0 = fmaxf(m[0], fmaxf(a0, b0)), row1 = fmaxf(m[1], fmaxf(a1, b1));
      row0 = fmaxf(row0, __shfl_xor_sync(kAllLanes, row0, 2));
      row1 = fmaxf(row1, __shfl_xor_sync(kAllLanes, row1, 2));
      row0 = fmaxf(row0, __shfl_xor_sync(kAllLanes, row0, 1));
      row1 = fmaxf(row1, __shfl_xor_sync(kAllLanes, row1, 1));
      // A row that has seen nothing has m = -inf; any finite stand-in makes its exponentials 0.
      cm[0] = row0 == -kInfinity ? 0.f : row0 * c;
      cm[1] = row1 == -kInfinity ? 0.f : row1 * c;
      alpha[0] = exp2_approx(fmaf(m[0], c, -cm[0]));
      alpha[1] = exp2_approx(fmaf(m[1], c, -cm[1]));
      m[0] = row0, m[1] = row1;
      l[0] *= alpha[0], l[1] *= alpha[1];
    };
    const auto exponentials = [&](int g) {  // P = exp2(c S - c m) of 8 keys, and their row sums
      float* s = S + 4 * g;
      s[0] = exp2_approx(fmaf(s[0], c, -cm[0])), s[2] = exp2_approx(fmaf(s[2], c, -cm[1]));
      s[1] = exp2_approx(fmaf(s[1], c, -cm[0])), s[3] = exp2_approx(fmaf(s[3], c, -cm[1]));
      l[0] += s[0], l[1] += s[2], l[0] += s[1], l[1] += s[3];
    };
    const auto round_p = [&] {
#pragma unroll
      for (int i = 0; i < kTileN / 4; ++i) P[i] = pack<Element>(S[2 * i], S[2 * i + 1]);
    };

    Work work, next;
    bool more = work_at(p, 0, work);
    if (!more) return;
    if (w == kConsumers - 1) give_turn();
    load_q();
    k_barriers.wait(ring);
    take_turn();
    issue_qk(ring.stage);
    give_turn();
    wgmma_wait<0>();
    pin(S);
    if (leader) k_barriers.release(ring);

    for (int i = 1; more; ++i) {  // a tile; S of its first block is in registers
      m[0] = m[1] = -kInfinity;
      l[0] = l[1] = 0.f;
      if (!kTile.q_in_registers && work.end - work.begin == 1) release_q();
      mask(p, work, work.m0 + w * kRows + thread_row, work.end - 1, lane, S);
      row_max();
#pragma unroll
      for (int g = 0; g < kGroups; ++g) exponentials(g);
      round_p();

      int accumulate = 0;
      const auto step = [&](int j, bool masked) {
        const auto here = ring.next();
        k_barriers.wait(here);
        take_turn();
        issue_qk(here.stage);
        v_barriers.wait(ring);
        issue_pv(ring.stage, accumulate);
        accumulate = 1;
        give_turn();
        wgmma_wait<1>();
        pin(S);
        if (!kTile.q_in_registers && j == work.begin) release_q();
        if (masked) mask(p, work, work.m0 + w * kRows + thread_row, j, lane, S);
        row_max();
#pragma unroll
        for (int g = 0; g < kTile.early_groups; ++g) exponentials(g);
        // ptxas moves a wait up over arithmetic that does not depend on it. This release depends on
        // the first exponentials (sums of them are never negative), so the wait below stays here:
        // late enough not to stall, early enough to hide the rescale of O under exponentials.
        if (leader && !(l[0] + l[1] < 0.f)) k_barriers.release(here);
        wgmma_wait<0>();
        pin(O);
        if (leader) v_barriers.release(ring);
#pragma unroll
        for (int g = kTile.early_groups; g < kGroups; ++g) exponentials(g);
#pragma unroll
        for (int e = 0; e < kTile.dv / 2; ++e) O[e] *= alpha[e / 2 % 2];
        round_p();
        ring = here;
      };
      int j = work.end - 2;
#pragma unroll 1
      for (; j >= max(work.clean_end, work.begin); --j) step(j, true);
#pragma unroll 1
      for (; j >= max(work.clean_begin, work.begin); --j) step(j, false);
#pragma unroll 1
      for (; j >= work.begin; --j) step(j, true);

      if (!kTile.q_in_registers) q_ring.advance();
      more = work_at(p, i, next);
      const auto here = ring.next();
      if (more) {
        load_q();
        k_barriers.wait(here);
        take_turn();
        issue_qk(here.stage);
        v_barriers.wait(ring);
        issue_pv(ring.stage, accumulate);
        give_turn();
        wgmma_wait<0>();
        pin(S);
        if (leader) k_barriers.release(here);
      } else {
        take_turn();
        v_barriers.wait(ring);
        issue_pv(ring.stage, accumulate);
        give_turn();
        wgmma_wait<0>();
      }
      pin(O);
      if (leader) v_barriers.release(ring);
      ring = here;
      epilogue(p, work, work.m0 + w * kRows + thread_row, lane, O, m, l);
      work = next;
    }
  }

  // S = -inf where the band hides the key. A thread's elements of a row, e = 0, 1, ..., stand at
  // columns 8 (e / 2) + e % 2 from its first one, so the visible ones are a range of e.
  static __device__ __forceinline__ void mask(const ForwardParams& p, const Work& work, int row,
                                              int block, int lane, float (&S)[kTileN / 2]) {
    const int first_column = block * kTileN + 2 * (lane % 4);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Keys keys = work.row(p, row + 8 * r);
      const int lo = elements_before(keys.lo - first_column);
      const int hi = elements_before(keys.hi - first_column);
#pragma unroll
      for (int word = 0; word < kWordsPerRow; ++word) {
        const uint32_t visible = low_bits(hi - 32 * word) & ~low_bits(lo - 32 * word);
#pragma unroll
        for (int e = 32 * word; e < min(kTileN / 4, 32 * word + 32); ++e) {
          float& s = S[4 * (e / 2) + 2 * r + e % 2];
          s = visible >> (e - 32 * word) & 1 ? s : -kInfinity;
        }
      }
    }
  }
  // How many of a thread's elements of a row stand before `column`, counted from its first one.
  static __device__ __forceinline__ int elements_before(int column) {
    return column <= 0 ? 0 : column / 8 * 2 + min(column % 8, 2);
  }
  static __device__ __forceinline__ uint32_t low_bits(int n) {
    return n <= 0 ? 0u : n >= 32 ? ~0u : (1u << n) - 1;
  }

  // ---- epilogue ----

  // o = O / l and lse, from registers. The four threads of a row trade pairs of columns for 16 bytes.
  static __device__ __forceinline__ void epilogue(const ForwardParams& p, const Work& work, int row,
                                                  int lane, float (&O)[kTile.dv / 2],
                                                  const float (&m)[2], float (&l)[2]) {
    const int quad = lane % 4;
    Element* o = static_cast<Element*>(p.o) + work.batch * p.o_stride_batch +
                 work.head * p.o_stride_head;
    float* lse = p.lse + work.batch * p.lse_stride_batch + work.head * p.lse_stride_head;
#pragma unroll
    for (int r = 0; r < 2; ++r, row += 8) {
      float sum = l[r];
      sum += __shfl_xor_sync(kAllLanes, sum, 1);
      sum += __shfl_xor_sync(kAllLanes, sum, 2);
      const float inverse = sum == 0.f ? 0.f : 1.f / sum;
      const bool stored = row < p.sq;
      if (stored && quad == 0) lse[row] = sum == 0.f ? -kInfinity : m[r] * (p.scale_log2 * kLn2) + logf(sum);
#pragma unroll
      for (int g = 0; g < kTile.dv / 8; g += 4) {
        uint32_t x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* pair = O + 4 * (g + i) + 2 * r;
          x[i] = pack<Element>(pair[0] * inverse, pair[1] * inverse);
        }
        transpose_quad(x, quad);
        const int column = 8 * (g + quad);
        if (stored && column < p.dv) {
          *reinterpret_cast<uint4*>(o + row * p.o_stride_row + column) = {x[0], x[1], x[2], x[3]};
        }
      }
    }
  }
  // x[i] of thread t becomes x[t] of thread i.
  static __device__ __forceinline__ void transpose_quad(uint32_t (&x)[4], int thread) {
#pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2) {
      const bool upper = thread & bit;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i & bit) continue;
        const uint32_t got = __shfl_xor_sync(kAllLanes, upper ? x[i] : x[i | bit], bit);
        (upper ? x[i] : x[i | bit]) = got;
      }
    }
  }
};

template <typename Element, typename Row>
__global__ void __launch_bounds__(Row::kTile.threads(), 1)
    forward(const __grid_constant__ ForwardParams p) {
  using Kernel = Forward<Element, Row>;
  constexpr int kConsumers = Kernel::kConsumers;
  extern __shared__ __align__(1024) uint8_t storage[];
  const typename Kernel::Shared shared{static_cast<uint32_t>(__cvta_generic_to_shared(storage))};
  const int warpgroup = uniform(threadIdx.x / kWarpgroup);
  if (threadIdx.x == 0) {
    tma_prefetch(&p.q);
    tma_prefetch(&p.k);
    tma_prefetch(&p.v);
    for (int w = 0; w < kConsumers; ++w) shared.q_barriers(w).init(kWarpgroup / kWarp);
    shared.k_barriers().init(kConsumers);
    shared.v_barriers().init(kConsumers);
    mbarrier_init_fence();
  }
  __syncthreads();
  wait_for_predecessors();
  launch_dependents();
  if (warpgroup == 0) {
    registers_release<Kernel::kProducerRegisters>();
    if (threadIdx.x == 0) Kernel::producer(p, shared);
  } else {
    registers_claim<Kernel::kConsumerRegisters>();
    Kernel::consumer(p, shared, warpgroup - 1);
  }
}

}  // namespace tessera::cuda::sm90
