// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "core/choose/backend.h"

namespace tessera::cpu {

// tessera_merge on the CPU. The arguments are validated; allocates nothing; context gives the
// threads.
void merge(const MergeArgs& args, const Buffers& context);

}  // namespace tessera::cpu
