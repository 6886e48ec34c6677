// SPDX-License-Identifier: Apache-2.0
// Fields of the C ABI that are there before any backend computes them. A backend that learns one
// stops asking here for it.
#pragma once

#include "core/choose/support.h"

namespace tessera {

// What a backend takes of fp8: nothing, fp8 q with scales, outputs in fp8 and their largest values,
// or besides 16-bit inputs that it rounds (precision="fp8").
enum class Fp8Inputs : uint8_t { kUnbuilt, kBuilt, kRounded };

// Adds a reason for every such field that the problem, which is normalised, gives.
void require_built(Support& support, const Problem& problem, Fp8Inputs fp8 = Fp8Inputs::kUnbuilt);

}  // namespace tessera
