// SPDX-License-Identifier: Apache-2.0
// The fused backward kernel: who finds the tile, and the roles of its warpgroups
// (backward/fused/shape.cuh).
#pragma once

#include "cuda/sm90/backward/fused/owner.cuh"
#include "cuda/sm90/backward/fused/producer.cuh"
#include "cuda/sm90/backward/fused/shape.cuh"

namespace tessera::cuda::sm90 {

template <typename Element, typename Row>
__global__ void __launch_bounds__(BackwardTile::kThreads, 1)
    backward(const __grid_constant__ typename Backward<Element, Row>::Args a) {
  using Kernel = Backward<Element, Row>;
  extern __shared__ __align__(1024) uint8_t storage[];
  const typename Kernel::Shared shared{static_cast<uint32_t>(__cvta_generic_to_shared(storage))};
  const int warpgroup = uniform_register(threadIdx.x / kWarpgroup);
  constexpr int kFinder = Kernel::kStartsEarly ? 0 : kWarp;  // of the tile
  if (threadIdx.x == (Kernel::kStartsEarly ? kWarp : 0)) {
    for (const CUtensorMap* map : {&a.q, &a.k, &a.v, &a.grad_o}) tma_prefetch(map);
    if constexpr (Kernel::kOfFp8) {
      for (const CUtensorMap* map : {&a.q8, &a.k8, &a.grad_o8}) tma_prefetch(map);
    }
  }
  if (threadIdx.x == 0) shared.init();
  auto& all = *reinterpret_cast<typename Kernel::SharedStorage*>(storage);
  KeyTile& tile = all.tile;
  int index = blockIdx.x;  // known to one thread
  if (threadIdx.x == kFinder) {
    if constexpr (kInTurn<Row>) {
      wait_for_predecessors();
      index = atomicAdd(&a.order->ticket, 1);
    } else if (a.ordered_slots > 0) {
      wait_for_predecessors();
    }
    if constexpr (kSumsBias<Row>) {  // sequences side by side
      const int tile_of_all = index / a.sequences;
      tile = Kernel::Schedule::decode(a, tile_of_all, index - tile_of_all * a.sequences);
    } else {
      tile = Kernel::Schedule::template decode<!kInTurn<Row>>(a, index);
      if (Kernel::kShares && tile.parts > 1) take_part(tile);
    }
    if constexpr (Kernel::kStartsEarly) BackwardProducer<Kernel>::start(a, tile, shared);
  }
  __syncthreads();
  launch_dependents();
  if (warpgroup == 0) {
    registers_release<Kernel::kProducerRegisters>();
    if (threadIdx.x < (Kernel::kLeavesOut ? kWarp : 1)) {
      BackwardProducer<Kernel>::run(a, tile, shared, all.masks);
    }
    OwedToSections<Kernel>::serve(a, tile, shared);
    if constexpr (kSumsBias<Row>) {
      BiasGradient<Element>::template serve<kInTurn<Row>>(a, tile, shared.bias_staging(),
                                                          Kernel::walk_of(tile));
    }
    if constexpr (kInTurn<Row> && Kernel::kOfSegments) {
      shared.turns().serve(a, tile, all.masks.line);
    } else if constexpr (kInTurn<Row>) {
      shared.turns().template serve<kSumsBias<Row>>(a, tile);
    }
  } else {
    registers_claim<Kernel::kOwnerRegisters>();
    BackwardOwner<Element, Row>::run(a, tile, shared, warpgroup - 1);
  }
}

}  // namespace tessera::cuda::sm90
