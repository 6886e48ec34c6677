// SPDX-License-Identifier: Apache-2.0
// The two backends of this room.
#pragma once

#include "core/backend.h"

namespace tessera::cpu {

const Backend& backend();  // "cpu": tiled kernels, refuses nothing legal in fp32, bf16, fp16
const Backend& reference_backend();  // "reference": the fp64 oracle, selectable by name only

}  // namespace tessera::cpu
