// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "core/choose/backend.h"

namespace tessera::cuda::cudnn {

// "cudnn": NVIDIA's library, where it keeps the contract. It is opened when the first problem runs
// there.
const Backend& backend();

}  // namespace tessera::cuda::cudnn
