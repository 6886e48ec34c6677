// SPDX-License-Identifier: Apache-2.0
#include "cpu/kernels_table.h"
#include "cpu/simd/avx2.h"

namespace tessera::cpu {

extern const Kernels kAvx2Kernels;
constinit const Kernels kAvx2Kernels = make_kernels<Avx2>("avx2");

}  // namespace tessera::cpu
