// SPDX-License-Identifier: Apache-2.0
// Both kernels of a row of backward/apart/table.def.
#pragma once

#include "cuda/sm90/backward/apart/dkdv.cuh"
#include "cuda/sm90/backward/apart/dq.cuh"

namespace tessera::cuda::sm90 {

template <typename Element, typename Row>
ApartCode make_apart() {
  constexpr int kDim = Row::kTile.dim;
  return {static_cast<int>(sizeof(typename BackwardDq<Element, kDim>::SharedStorage)),
          static_cast<int>(sizeof(typename BackwardDkdv<Element, kDim>::SharedStorage)),
          reinterpret_cast<const void*>(&backward_dq<Element, kDim>),
          reinterpret_cast<const void*>(&backward_dkdv<Element, kDim>)};
}

}  // namespace tessera::cuda::sm90
