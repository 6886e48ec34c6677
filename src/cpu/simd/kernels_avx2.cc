// SPDX-License-Identifier: Apache-2.0
#include "cpu/simd/avx2.h"
#include "cpu/simd/kernels_table.h"

namespace tessera::cpu {

extern const Kernels kAvx2Kernels;
constinit const Kernels kAvx2Kernels = make_kernels<Avx2>("avx2");

}  // namespace tessera::cpu
