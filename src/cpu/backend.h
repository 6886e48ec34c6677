// SPDX-License-Identifier: Apache-2.0
// The backend of this folder.
#pragma once

#include "core/choose/backend.h"

namespace tessera::cpu {

const Backend& backend();  // "cpu": tiled kernels, refuses nothing legal in fp32, bf16, fp16

}  // namespace tessera::cpu
