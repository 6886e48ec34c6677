// SPDX-License-Identifier: Apache-2.0
// Attention forward of E4M3 on Hopper.
//
//   S = Q K^T              64 queries a warpgroup x 128 keys, by E4M3 wgmma
//   P = 256 exp2(c S - c m)  c = softmax_scale * q_scale * k_scale * log2(e), m: the row's largest
//                          score so far; rounded to E4M3 and kept in registers (fp8/softmax.cuh)
//   T = P V                by E4M3 wgmma, whose sums are short, so of one block at a time
//   O = A O + T            in fp32; A: by how much m has moved since. As a multiply-add it costs
//                          nothing to do it for every block, and no branch
//   o = O v_scale / l,  lse = (c m + log2(l / 256)) / log2(e)
//
// l: the sum of P. With exact_sum before it is rounded, by additions. Otherwise a row of ones under
// V^T makes it, and the weights' bytes come from the FMA pipe alone: no exponential and no
// conversion, 23 % of the clocks of a block.
//
// q [b, sq, hq, dqk], k [b, sk, hk, dqk] E4M3, o [b, sq, hq, dv] in 16 bits, any strides; V^T lies
// in the workspace (fp8/transpose.h). The roles, the rings and the order of tiles are those of
// forward/kernel.cuh. Consumers take no turns: E4M3 products queue without holding up the warp that
// issues them.
#pragma once

#include "cuda/sm90/forward/roles.cuh"
#include "cuda/sm90/fp8/consumer.cuh"
#include "cuda/sm90/fp8/kernels.h"

namespace tessera::cuda::sm90 {

template <typename Element, typename Row>
__global__ void __launch_bounds__(Row::kTile.threads(), 1)
    fp8_forward(const __grid_constant__ Fp8Params p) {
  using Kernel = Fp8Forward<Element, Row>;
  extern __shared__ __align__(1024) uint8_t storage[];
  const typename Kernel::Shared shared{static_cast<uint32_t>(__cvta_generic_to_shared(storage))};
  auto& in_shared = *reinterpret_cast<typename Kernel::SharedStorage*>(storage);
  const int warpgroup = uniform(threadIdx.x / kWarpgroup);
  if (threadIdx.x == 0) {
    tma_prefetch(&p.q);
    tma_prefetch(&p.k);
    tma_prefetch(&p.v);
    for (int w = 0; w < Kernel::kConsumers; ++w) shared.q_barriers(w).init(kWarpgroup / kWarp);
    shared.k_barriers().init(Kernel::kConsumers);
    shared.v_barriers().init(Kernel::kConsumers);
    shared.work_barriers().init(Kernel::kLoaders + Kernel::kConsumers * (kWarpgroup / kWarp));
    mbarrier_init_fence();
    in_shared.blocks_loaded = 0;
  }
  if constexpr (Kernel::kSumRows > 0) Kernel::fill_sum_rows(storage);
  __syncthreads();
  launch_dependents();
  take_roles<Element, Kernel>(
      p, in_shared, shared, warpgroup,
      [&](const auto* works, volatile int& loaded) {
        if (is_first_lane()) load_keys<Kernel>(p, works, loaded, shared);
      },
      [&](const auto* works) {
        if (is_first_lane()) Kernel::load_values(p, works, shared);
      });
}

template <typename Element, typename Row>
Fp8Code make_fp8() {
  return {static_cast<int>(sizeof(typename Fp8Forward<Element, Row>::SharedStorage)),
          reinterpret_cast<const void*>(&fp8_forward<Element, Row>)};
}

}  // namespace tessera::cuda::sm90
