// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "core/choose/backend.h"

namespace tessera::cuda::sm80 {

// "cuda_sm80": every feature on every GPU from compute capability 8.0 on, by mma.sync and cp.async.
// Refuses fp64; needs a driver only to run.
const Backend& backend();

}  // namespace tessera::cuda::sm80
