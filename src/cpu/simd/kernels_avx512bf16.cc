// SPDX-License-Identifier: Apache-2.0
#include "cpu/simd/avx512bf16.h"
#include "cpu/simd/kernels_table.h"

namespace tessera::cpu {

extern const Kernels kAvx512Bf16Kernels;
constinit const Kernels kAvx512Bf16Kernels = make_kernels<Avx512Bf16>("avx512bf16");

}  // namespace tessera::cpu
