// SPDX-License-Identifier: Apache-2.0
// Decoding on Hopper: the forward pass for few rows and many keys, in one launch. It is bound by the
// bytes of K and V, so everything serves to keep loads in flight, on every multiprocessor, to the
// end.
//
// Work is dealt out on the device from live lengths (common/work/work.cuh): each CTA takes an equal
// run of blocks of 64 keys, or a part of a unit of its own. A producer warp looks up pages and brings
// blocks by TMA, across units and sequences; two teams of four warps take them by turns, each warp
// 16 keys of a block with a softmax and an O of its own, in the products of common/few/rows.cuh:
//
//     producer   q, work | K V | K V | K V | ...
//     team t     S^T = K Q^T | softmax | O^T += V^T P^T    on blocks t, t + 2, ... of a piece
//     at last    o = sum_w 2^(m_w - m) O_w / l, of warps, then of pieces by who brings the last
//
// Which team has a block is a matter of the piece alone, so that a piece's bits do not depend on what
// its CTA had before.
//
// q [b, sq, hq, d], k, v [b, sk, hk, d] or pages of them, o [b, sq, hq, d]; q and o in 16 bits, k and
// v in the same or in E4M3.
#pragma once

#include "cuda/sm90/decode/consumer.cuh"
#include "cuda/sm90/decode/producer.cuh"

namespace tessera::cuda::sm90 {

template <typename T, typename Row>
__global__ void __launch_bounds__(Row::kTile.kThreads, 1)
    decode_forward(const __grid_constant__ DecodeArgs args) {
  using S = Decode<T, Row>;
  extern __shared__ __align__(1024) uint8_t raw[];
  auto& storage = *reinterpret_cast<typename S::SharedStorage*>(raw);
  const typename S::Shared shared{static_cast<uint32_t>(__cvta_generic_to_shared(raw))};
  const bool produces = uniform(threadIdx.x / kWarp) == S::kWarps;
  if (threadIdx.x == S::kConsumers) {
    tma_prefetch(&args.q);
    tma_prefetch(&args.k);
    tma_prefetch(&args.v);
    shared.init();
  }
  __syncthreads();
  wait_for_predecessors();
  launch_dependents();
  if (produces) {
    DecodeProducer<S>(args, storage.work, shared).produce();
  } else {
    DecodeConsumer<S>(args, storage, shared).run();
  }
}

template <typename T, typename Row>
DecodeCode make_decode() {
  return {static_cast<int>(sizeof(typename Decode<T, Row>::SharedStorage)),
          reinterpret_cast<const void*>(&decode_forward<T, Row>)};
}

}  // namespace tessera::cuda::sm90
