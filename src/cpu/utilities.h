// SPDX-License-Identifier: Apache-2.0
// tessera_merge and tessera_dropout_mask on the CPU. The arguments are validated. Neither
// allocates; context gives the threads.
#pragma once

#include "core/backend.h"

namespace tessera::cpu {

void merge(const MergeArgs& args, const Buffers& context);
void dropout_mask(const DropoutMaskArgs& args, const Buffers& context);

}  // namespace tessera::cpu
