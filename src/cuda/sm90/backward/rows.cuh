// SPDX-License-Identifier: Apache-2.0
// The two kernels around the backward pass: lse2, delta and cleared sums before it, dq after it.
#pragma once

#include <type_traits>

#include "cuda/sm90/backward/fused/kernel.cuh"
#include "cuda/sm90/backward/fused/sections.cuh"
#include "cuda/sm90/backward/kernels.h"
#include "cuda/sm90/backward/pair/kernel.cuh"
#include "cuda/sm90/backward/schedule/slot_order.cuh"

namespace tessera::cuda::sm90 {

// The kernel between the two.
template <typename Element, typename Row>
using MainKernel =
    std::conditional_t<Row::kTile.pair, BackwardPair<Element, Row>, Backward<Element, Row>>;

template <typename Element, typename Row>
struct BackwardRows {
  using Kernel = MainKernel<Element, Row>;
  static constexpr int kTileM = Kernel::kTileM, kCtas = Row::kTile.ctas();
  using Tile = typename Kernel::GradOTile;

  struct alignas(1024) SharedStorage {
    union {
      uint8_t o_and_grad_o[2][Tile::kBytes];
      SlotOrder slot_order;  // of the first CTA, before it loads them
    };
    uint64_t barrier;
  };
  // Products of E4M3 load neither.
  static constexpr size_t kSharedBytes = Row::kTile.fp8 ? sizeof(SlotOrder) : sizeof(SharedStorage);
};

// lse, or its gradient, of a query.
__device__ __forceinline__ float row_statistic(const View& view, const Rows& rows, int head,
                                               int row) {
  return static_cast<const float*>(view.data)[offset_of(view, rows.batch, head, rows.first + row)];
}

// delta by the very products that dP is made of: the diagonal of O dO^T on the tensor cores. dP -
// delta is then exactly 0 where o is a row of v, because one key is visible. Products of E4M3 are
// less exact than that; there it is a sum in fp32.
template <typename Element, typename Row>
__global__ void __launch_bounds__(kWarpgroup)
    backward_rows(const __grid_constant__ BackwardParams a) {
  using Kernel = MainKernel<Element, Row>;
  using Storage = typename BackwardRows<Element, Row>::SharedStorage;
  using Tile = typename Kernel::GradOTile;
  constexpr int kTileM = Kernel::kTileM;
  extern __shared__ __align__(1024) uint8_t storage[];
  const uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(storage));
  const uint32_t o = base, grad_o = base + Tile::kBytes,
                 barrier = base + offsetof(Storage, barrier);
  const Params& p = a.problem;
  if (!Row::kTile.fp8 && threadIdx.x == 0) {
    tma_prefetch(&a.o);
    tma_prefetch(&a.grad_o);
    mbarrier_init(barrier, 1);
    mbarrier_init_fence();
  }
  wait_for_predecessors();
  launch_dependents();
  if (kInTurn<Row> && blockIdx.x == 0 && blockIdx.y == 0) {
    const bool overlap = sequences_overlap(p);
    if (threadIdx.x == 0) *a.order = {0, overlap};
  }
  if (!kInTurn<Row> && a.ordered_slots > 0 && blockIdx.x == 0 && blockIdx.y == 0) {
    static_assert(kSlotClasses == kWarpgroup);
    reinterpret_cast<SlotOrder*>(storage)->write<typename Kernel::Schedule>(
        a, [](const auto& body) {
          body(static_cast<int>(threadIdx.x));
          async_proxy_fence();  // O and dO come by TMA to where it is made
          __syncthreads();
        });
  }
  const auto find_spans = [&] {
    if constexpr (kIsOfSegments<Row>) {
      const int ctas = static_cast<int>(gridDim.x * gridDim.y);
      for (int slot = blockIdx.y * gridDim.x + blockIdx.x; slot < a.span_slots; slot += ctas) {
        Kernel::SegmentsOf::find_spans(a, slot);
      }
    }
  };
  if (a.ahead > 0 && blockIdx.x == 0 && blockIdx.y == 0) {
    for (int i = threadIdx.x; i < 2 * p.batch * p.hk; i += kWarpgroup) a.counts[i] = 0;
  }
  if (a.parts > 0) {
    const int ctas = static_cast<int>(gridDim.x * gridDim.y);
    const int first =
        static_cast<int>(blockIdx.y * gridDim.x + blockIdx.x) * kWarpgroup + threadIdx.x;
    for (int i = first; i < a.num_arrivals; i += ctas * kWarpgroup) a.arrivals[i] = 0;
  }
  const BlockOfSlot at = block_of_slot(p, blockIdx.x, kTileM);
  const Rows rows = rows_of<SideOfQueries>(p, at.n);
  const int row0 = at.block * kTileM, head = blockIdx.y, thread = threadIdx.x;
  if (at.block < 0 || row0 >= rows.length) return find_spans();
  const int64_t slot = slot_of_head(a, head, blockIdx.x);
  if (!Row::kTile.fp8 && thread == 0) {
    mbarrier_arrive_expect(barrier, 2 * Tile::kBytes);
    const MapRow row = map_row(a.reach_q, rows, row0);
    Tile::load(o, &a.o, barrier, head, row.c2, row.c3, rows.batch);
    Tile::load(grad_o, &a.grad_o, barrier, head, row.c2, row.c3, rows.batch);
  }
  if (kInTurn<Row> && a.dq_sums && thread < BackwardRows<Element, Row>::kCtas) {
    a.turns[int64_t{thread} * p.hq * a.slots + slot] = 0;
  }
  const int key_head = at.n * p.hk + head / p.group;
  const bool by_tiles = a.ahead > 0 && key_head >= a.ahead && key_head < a.last_head + a.ahead;
  if (a.dq_sums && !kInTurn<Row> && !by_tiles) {
    clear_sums<Kernel>(a, slot, thread, kWarpgroup);
  }
  if (kSumsBias<Row> && a.sequences > 1 && at.n == 0) {
    const int marks = 2 * a.tiles_n.divisor, blocks = (p.sq + kTileM - 1) / kTileM;
    int* const to = a.bias_marks + (int64_t{head} * blocks + at.block) * marks;
    for (int i = thread; i < marks; i += kWarpgroup) to[i] = 0;
  }
  const int warp = thread / kWarp, lane = thread % kWarp;
  if (warp == 1) Kernel::Blocks::note(a, rows, head, row0, slot);
  if constexpr (kIsOfSegments<Row> && kInTurn<Row>) {
    if (warp == 2 && head == 0 && a.orders) {
      Kernel::SegmentsOf::note_order(a, rows, row0, blockIdx.x);
    }
  }
  if constexpr (Row::kTile.fp8) {
    return write_rounded_statistics<Element, Kernel>(a, rows, head, row0, slot);
  }
  // Rows lane / 4 and + 8 of a warp's 16 are columns of its own groups, of one thread of the quad:
  // row half * 64 + of_thread + 8 r of the block is its. Asked for while O and dO come.
  const int of_thread = warp * 16 + lane / 4;
  const bool has_rows = lane % 4 == lane / 8;
  struct {
    float lse, grad_lse;
  } given[kTileM / 32];
#pragma unroll
  for (int i = 0; i < kTileM / 32; ++i) {
    given[i] = {-kInfinity, 0};
    const int row = row0 + i / 2 * 64 + of_thread + i % 2 * 8;
    if (!has_rows || row >= rows.length) continue;
    given[i].lse = row_statistic(p.tensor[TESSERA_LSE], rows, head, row);
    if (p.tensor[TESSERA_DLSE].data) {
      given[i].grad_lse = row_statistic(p.tensor[TESSERA_DLSE], rows, head, row);
    }
  }
  find_spans();
  __syncthreads();
  mbarrier_wait(barrier, 0);

#pragma unroll
  for (int half = 0; half < kTileM / 64; ++half) {
    float product[32];
    const uint32_t rows_before = half * 64 * kChunkRowBytes;
    const uint64_t x = Tile::k_major(o + rows_before), y = Tile::k_major(grad_o + rows_before);
    issue_scores<Element, Tile, Tile, Kernel::kTile.dv>(product, x, y);
    wgmma_wait<0>();
    pin(product);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float diagonal = 0;
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float* pair = product + 4 * (2 * w + r) + 2 * r;
        if (w == warp) diagonal = lane / 4 % 2 ? pair[1] : pair[0];
      }
      if (!has_rows) continue;
      const int i = half * 64 + of_thread + 8 * r;
      const auto [lse, grad_lse] = given[2 * half + r];
      float lse2 = kLog2e * lse, delta = diagonal - grad_lse;
      // Rows that do not exist, and those that see no key; of a very low sink they have an lse.
      const float lowest2 = p.tensor[TESSERA_BIAS].data ? kLowest2 : -kInfinity;
      if (lse2 <= lowest2) lse2 = kInfinity;
      if (lse == -kInfinity) delta = 0;
      lse2 -= log2f(p.dropout_scale), delta /= p.dropout_scale;
      const int place = kIsLean<Row> ? place_in_quads(i) : i;
      a.lse2[slot * kTileM + place] = lse2;
      a.delta[slot * kTileM + place] = delta;
    }
  }
}

template <typename Row>
inline constexpr bool kTilesConvert = tiles_convert(Row::kTile);

// dq = softmax_scale * sums; zeros in rows that are stored but belong to no sequence.
template <typename Element, typename Row>
__global__ void __launch_bounds__(kWarpgroup)
    backward_convert(const __grid_constant__ BackwardParams a) {
  using Kernel = MainKernel<Element, Row>;
  constexpr int kTileM = Kernel::kTileM;
  const Params& p = a.problem;
  int slot_of_rows = blockIdx.x, head = blockIdx.y;
  if (kTilesConvert<Row> && a.ahead > 0) {  // the last section, by heads of the batch
    const int x = a.last_head * p.group + head, n = x / p.hq;
    head = x - n * p.hq;
    slot_of_rows += n * ((p.sq + kTileM - 1) / kTileM);
  }
  const TileOfRows tile = tile_of_slot<SideOfQueries>(p, slot_of_rows, kTileM);
  const Rows rows = rows_of<SideOfQueries>(p, tile.n);
  if (tile.begin >= rows.owned_hi) return;
  bool summed = tile.begin >= 0 && tile.begin < rows.length;
  const int first_slot =
      first_slot_of(p.thd_q, tile.n, rows.first, kTileM, (p.sq + kTileM - 1) / kTileM);
  const int64_t slot = slot_of_head(a, head, first_slot + tile.begin / kTileM);
  wait_for_predecessors();
  if constexpr (kInTurn<Row>) summed = summed && Kernel::Order::has_sums(a.turns[slot]);
#pragma unroll 1
  for (int part = blockIdx.z; part < Kernel::kPartsOfDq; part += gridDim.z) {
    float dQ[Kernel::kColumnsOfDq / 2];
    load_sums<Kernel>(a, slot, part, summed, dQ);
    store_dq<Element, Kernel>(a, rows, head, tile.begin, part, dQ);
  }
}

template <typename Element, typename Row>
BackwardCode make_backward() {
  using Kernel = MainKernel<Element, Row>;
  const void* gradients;
  if constexpr (Row::kTile.pair) {
    gradients = reinterpret_cast<const void*>(&backward_pair<Element, Row>);
  } else {
    gradients = reinterpret_cast<const void*>(&backward<Element, Row>);
  }
  return {static_cast<int>(sizeof(typename Kernel::SharedStorage)),
          static_cast<int>(BackwardRows<Element, Row>::kSharedBytes),
          kIsLean<Row>,
          reinterpret_cast<const void*>(&backward_rows<Element, Row>),
          gradients,
          reinterpret_cast<const void*>(&backward_convert<Element, Row>)};
}

}  // namespace tessera::cuda::sm90
