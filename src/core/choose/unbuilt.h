// SPDX-License-Identifier: Apache-2.0
// Fields of the C ABI that are there before any backend computes them. A backend that learns one
// stops asking here for it.
#pragma once

#include "core/choose/support.h"

namespace tessera {

// Whether a backend takes fp8 q with scales, outputs in fp8 and their largest values.
enum class Fp8Inputs : uint8_t { kUnbuilt, kBuilt };

// Adds a reason for every such field that the problem, which is normalised, gives.
void require_built(Support& support, const Problem& problem, Fp8Inputs fp8 = Fp8Inputs::kUnbuilt);

}  // namespace tessera
