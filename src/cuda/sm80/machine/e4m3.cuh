// SPDX-License-Identifier: Apache-2.0
// E4M3 to fp16, which holds every value of it, NaN too.
#pragma once

#include "cuda/common/element.cuh"

namespace tessera::cuda::sm80 {

// The two E4M3 of the low 16 bits as fp16. One instruction from sm89 on.
__device__ __forceinline__ uint32_t halves_of_e4m3(uint32_t pair) {
  const __half2_raw halves =
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(pair), __NV_E4M3);
  return halves.x | static_cast<uint32_t>(halves.y) << 16;
}

}  // namespace tessera::cuda::sm80
