// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "core/choose/backend.h"

namespace tessera::cuda {

// tessera_sum_rows: as many sums in a launch as its arguments have room for. The arguments are validated.
Status sum_rows(const RowSums& args, const Buffers& context, const Device& device);

}  // namespace tessera::cuda
