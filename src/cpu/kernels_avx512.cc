// SPDX-License-Identifier: Apache-2.0
#include "cpu/kernels_table.h"
#include "cpu/simd/avx512.h"

namespace tessera::cpu {

extern const Kernels kAvx512Kernels;
constinit const Kernels kAvx512Kernels = make_kernels<Avx512>("avx512");

}  // namespace tessera::cpu
