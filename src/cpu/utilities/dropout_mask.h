// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "core/choose/backend.h"

namespace tessera::cpu {

// tessera_dropout_mask on the CPU. The arguments are validated; allocates nothing; context gives
// the threads.
void dropout_mask(const DropoutMaskArgs& args, const Buffers& context);

}  // namespace tessera::cpu
