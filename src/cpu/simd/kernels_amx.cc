// SPDX-License-Identifier: Apache-2.0
#include "cpu/simd/amx.h"
#include "cpu/simd/kernels_table.h"

namespace tessera::cpu {

extern const Kernels kAmxKernels;
constinit const Kernels kAmxKernels = make_kernels<Amx>("amx");

}  // namespace tessera::cpu
