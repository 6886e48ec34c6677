// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "core/choose/backend.h"

namespace tessera::cuda::sm90 {

// "cuda_sm90": attention forward and backward in bf16 and fp16 on Hopper, by wgmma and TMA. What it
// refuses, the sm80 backend takes.
const Backend& backend();

}  // namespace tessera::cuda::sm90
