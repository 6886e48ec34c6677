// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "core/choose/backend.h"

namespace tessera::cpu {

// tessera_sum_rows on the CPU. The arguments are validated; context gives the threads.
void sum_rows(const RowSums& args, const Buffers& context);

}  // namespace tessera::cpu
