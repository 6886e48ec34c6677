// SPDX-License-Identifier: Apache-2.0
// Attention forward on Hopper.
//
//   S = Q K^T                  64 queries a warpgroup x tile_n keys, fp32 accumulators
//   P = exp2(c S - c m)        c = softmax_scale * log2(e); m: a reference for each row
//   l = l + rowsum P
//   O = O + P V                P rounded to 16 bits and kept in registers
//   o = O / l,  lse = (c m + log2 l) / log2(e)
//
// Any m that keeps P in range gives the same o, so m is no running maximum. It is the row's maximum
// in the tile's first block. A later block takes its exponentials at once; its row sums show
// whether a weight left the range. If one did, the warp does the block again from S, which is still
// in registers: m becomes the largest score so far, and O and l are scaled to that. So a score
// costs a multiply-add, an exponential and an addition; there is no maximum, no shuffle and no
// rescaling.
//
// q [b, sq, hq, dqk], k [b, sk, hk, dqk], v [b, sk, hk, dv], o [b, sq, hq, dv], lse [b, hq, sq];
// any strides. A CTA is persistent and computes row tiles of tile_m queries of one head:
//
//   warpgroup 0  warp 0       scheduler: the tiles, ahead of time
//                warps 1 - 3  loaders, a thread each, by TMA: Q (and o, where o_by_tma); K(j)
//                             (and the bias); V(j). Of pages, all lanes of the last two
//   warpgroup 1  consumer 0   | QK(j) PV(j+1) |   softmax(j)    | QK(j-1) PV(j) | ...
//   warpgroup 2  consumer 1     softmax(j+1)  | QK(j) PV(j+1) |   softmax(j)    | ...
//
// The consumers take turns on the tensor cores: issuing a step's products takes about as long as
// executing them, so what overlaps with a softmax are the products of the other warpgroup. Blocks
// of keys run right to left, j from the last to the first, so that the blocks that a causal mask or
// the end of a sequence cuts come first and the steady loop has no mask code. (ALiBi has an order
// of its own, see forward/score/alibi.cuh.) At the end of a tile the first product of the next one
// is issued with the last of this one, so that the tensor cores do not see where tiles end. o
// leaves from registers, or by TMA through the shared memory of its own queries (o_by_tma). A CTA
// with one consumer shares its SM with others, and there are no turns.
//
//   barrier                 arrivals                     says
//   work.full[s]            1: the scheduler             a tile is described
//   work.empty[s]           1 of each loader, 4 of each  nobody reads that any more
//                           consumer (a warp each)
//   q[w].full[s]            1 + bytes                    64 queries of consumer w have arrived
//   q[w].empty[s]           4 (a warp each)              consumer w has read them; o_by_tma:
//                                                        and has put o in their place
//   k.full[s], v.full[s]    1 + bytes                    a block has arrived
//   k.empty[s], v.empty[s]  1 of each consumer           a block has been used
//   bias[w].full            1 + bytes                    a block's bias for the rows of consumer w
//   bias[w].empty           4 (a warp each)              it has been added
//   turn(w), named          256: consumer w and the one  consumer w may issue products
//                           before it
#pragma once

#include "cuda/sm90/forward/consumer.cuh"
#include "cuda/sm90/forward/kernels.h"
#include "cuda/sm90/forward/pages/e4m3.cuh"
#include "cuda/sm90/forward/pages/loaders.cuh"
#include "cuda/sm90/forward/params.h"
#include "cuda/sm90/forward/roles.cuh"
#include "cuda/sm90/forward/shape.cuh"
#include "cuda/sm90/machine/ptx.cuh"

namespace tessera::cuda::sm90 {

template <typename Element, typename Row>
__global__ void __launch_bounds__(Row::kTile.threads(), Row::kTile.ctas)
    forward(const __grid_constant__ typename Forward<Element, Row>::Arguments p) {
  using Kernel = Forward<Element, Row>;
  constexpr int kConsumers = Kernel::kConsumers;
  extern __shared__ __align__(1024) uint8_t storage[];
  const typename Kernel::Shared shared{static_cast<uint32_t>(__cvta_generic_to_shared(storage))};
  auto& in_shared = *reinterpret_cast<typename Kernel::SharedStorage*>(storage);
  const int warpgroup = uniform(threadIdx.x / kWarpgroup);
  if (threadIdx.x == 0) {
    tma_prefetch(&p.q);
    if (!Kernel::kTile.e4m3) {
      tma_prefetch(&p.k);
      tma_prefetch(&p.v);
    }
    if (Kernel::kTile.o_by_tma) tma_prefetch(&p.o);
    for (int w = 0; w < kConsumers; ++w) {
      shared.q_barriers(w).init(kWarpgroup / kWarp);
      shared.bias(w).barriers.init(kWarpgroup / kWarp);
    }
    shared.k_barriers().init(kConsumers);
    shared.v_barriers().init(kConsumers);
    shared.work_barriers().init(Kernel::kLoaders + kConsumers * (kWarpgroup / kWarp));
    mbarrier_init_fence();
    in_shared.blocks_loaded = 0;
  }
  if constexpr (Kernel::kAddsByProducts) Kernel::Progression::fill_indices(shared.indices());
  __syncthreads();
  launch_dependents();
  if constexpr (Kernel::kTile.e4m3) {
    take_roles<Element, Kernel>(
        p, in_shared, shared, warpgroup,
        [&](const auto* works, volatile int& loaded) {
          convert_paged_keys<Element, Kernel>(p, works, loaded, shared);
        },
        [&](const auto* works) { convert_paged_values<Element, Kernel>(p, works, shared); });
  } else if constexpr (Kernel::kTile.pages) {
    take_roles<Element, Kernel>(
        p, in_shared, shared, warpgroup,
        [&](const auto* works, volatile int& loaded) {
          load_paged_keys<Kernel>(p, works, loaded, shared);
        },
        [&](const auto* works) { load_paged_values<Kernel>(p, works, shared); });
  } else {
    take_roles<Element, Kernel>(
        p, in_shared, shared, warpgroup,
        [&](const auto* works, volatile int& loaded) {
          if (is_first_lane()) load_keys<Kernel>(p, works, loaded, shared);
        },
        [&](const auto* works) {
          if (is_first_lane()) load_values<Kernel>(p, works, shared);
        });
  }
}

template <typename Element, typename Row>
ForwardCode make_forward() {
  return {static_cast<int>(sizeof(typename Forward<Element, Row>::SharedStorage)),
          reinterpret_cast<const void*>(&forward<Element, Row>)};
}

}  // namespace tessera::cuda::sm90
