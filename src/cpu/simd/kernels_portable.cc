// SPDX-License-Identifier: Apache-2.0
#include "cpu/simd/kernels_table.h"
#include "cpu/simd/portable.h"

namespace tessera::cpu {

extern const Kernels kPortableKernels;
constinit const Kernels kPortableKernels = make_kernels<Portable>("portable");

}  // namespace tessera::cpu
