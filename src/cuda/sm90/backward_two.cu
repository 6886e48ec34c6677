// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm90/backward_dkdv.cuh"
#include "cuda/sm90/backward_dq.cuh"

namespace tessera::cuda::sm90 {
namespace {

template <typename Element, int kDim>
TwoKernels make_two(int dtype) {
  return {dtype,
          kDim,
          static_cast<int>(sizeof(typename BackwardDq<Element, kDim>::SharedStorage)),
          static_cast<int>(sizeof(typename BackwardDkdv<Element, kDim>::SharedStorage)),
          reinterpret_cast<const void*>(&backward_dq<Element, kDim>),
          reinterpret_cast<const void*>(&backward_dkdv<Element, kDim>)};
}

}  // namespace

std::span<const TwoKernels> two_kernels() {
  static const TwoKernels table[] = {
      make_two<__nv_bfloat16, 64>(TESSERA_BF16), make_two<__half, 64>(TESSERA_FP16),
      make_two<__nv_bfloat16, 128>(TESSERA_BF16), make_two<__half, 128>(TESSERA_FP16)};
  return table;
}

}  // namespace tessera::cuda::sm90
