// SPDX-License-Identifier: Apache-2.0
// What all that read a bias share: elements in pairs, and how many loads are in flight.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/common/element.cuh"

namespace tessera::cuda::sm90 {

// Loads in flight take registers: this many at a time. All at once would spill.
constexpr int kLoadsAtOnce = 8;
__device__ __forceinline__ void no_loads_across() { asm volatile("" ::: "memory"); }

template <typename Element>
__device__ __forceinline__ float low_element(uint32_t pair) {
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) return __uint_as_float(pair << 16);
  return __low2float(reinterpret_cast<const __half2&>(pair));
}
template <typename Element>
__device__ __forceinline__ float high_element(uint32_t pair) {
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) return __uint_as_float(pair & 0xffff0000u);
  return __high2float(reinterpret_cast<const __half2&>(pair));
}

}  // namespace tessera::cuda::sm90
