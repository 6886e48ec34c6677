// SPDX-License-Identifier: Apache-2.0
#include "cpu/simd/avx512.h"
#include "cpu/simd/kernels_table.h"

namespace tessera::cpu {

extern const Kernels kAvx512Kernels;
constinit const Kernels kAvx512Kernels = make_kernels<Avx512>("avx512");

}  // namespace tessera::cpu
