// SPDX-License-Identifier: Apache-2.0
// Forward pass of latent attention (MLA) on Hopper: few rows of many heads on one key head, whose v
// is the first columns of k, so that keys are read once for both.
//
// Work is dealt out on the device from live lengths (common/work/work.cuh). A CTA has 64 rows; where
// a unit has 128, two CTAs have the same pieces, and the second reads the keys from L2. Two consumer
// warpgroups have half of the columns of O each, and one block of each pair of blocks of 64 keys:
//
//   W0:  S0 = Q K0^T | softmax, P0 out | O_left += P0 V0    | P1 there | O_left += P1 V1
//   W1:  S1 = Q K1^T | P0 there | O_right += P0 V0 under softmax, P1 out | O_right += P1 V1
//
// Q and the two K are all of the shared memory. Each half of a K has readers that are known in
// advance; the last of them frees it. Parts of units go to the workspace and are summed by a second
// kernel, which starts while the first ends.
//
// Keys come by boxes of TMA; where no box fits the pages, by copies that four warps make row by row
// (row_copies.cuh). An E4M3 cache is converted on its way (converter.cuh), which four warps do, two
// CTAs of a unit half each. All else is the same.
//
// q [b, sq, hq, dqk], k [b, sk, hk, dqk] or pages of it, o [b, sq, hq, dv], in 16 bits, any strides.
#pragma once

#include "cuda/sm90/mla/consumer.cuh"
#include "cuda/sm90/mla/merge.cuh"
#include "cuda/sm90/mla/producer.cuh"

namespace tessera::cuda::sm90 {

template <typename Element, typename Row>
__global__ void __launch_bounds__(Row::kTile.kThreads, 1)
    mla_forward(const __grid_constant__ MlaArgs args) {
  using Kernel = Mla<Element, Row>;
  extern __shared__ __align__(1024) uint8_t raw[];
  auto& storage = *reinterpret_cast<typename Kernel::SharedStorage*>(raw);
  const typename Kernel::Shared shared{static_cast<uint32_t>(__cvta_generic_to_shared(raw))};
  const int warpgroup = uniform(threadIdx.x / kWarpgroup);
  const int rank = blockIdx.x % Kernel::kCtas;
  if (threadIdx.x == 0) {
    tma_prefetch(&args.q);
    if constexpr (Kernel::kBoxes) tma_prefetch(&args.k);
    shared.init();
  }
  if constexpr (Kernel::kSharers > 1) {
    cluster_sync();  // the other CTA's barriers are there
  } else {
    __syncthreads();
  }
  wait_for_predecessors();
  launch_dependents();
  if (warpgroup == 0) {
    registers_release<Kernel::kProducerRegisters>();
    const int warp = uniform(threadIdx.x / kWarp);
    if (warp < Kernel::kBringers) {
      MlaProducer<Kernel>(args, storage.work, shared, rank, warp)
          .produce(blockIdx.x / Kernel::kCtas, gridDim.x / Kernel::kCtas);
    }
  } else {
    registers_claim<Kernel::kConsumerRegisters>();
    MlaConsumer<Kernel>(args, storage, shared, rank, warpgroup - 1).run();
  }
  if constexpr (Kernel::kSharers > 1) cluster_sync();  // the other CTA may still bring keys here
}

template <typename Element, typename Row>
MlaCode make_mla() {
  return {static_cast<int>(sizeof(typename Mla<Element, Row>::SharedStorage)),
          reinterpret_cast<const void*>(&mla_forward<Element, Row>),
          reinterpret_cast<const void*>(&mla_merge<Element, Row>)};
}

}  // namespace tessera::cuda::sm90
