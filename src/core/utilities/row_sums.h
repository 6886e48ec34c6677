// SPDX-License-Identifier: Apache-2.0
// The rules of tessera_sum_rows.
#pragma once

#include "core/choose/backend.h"

namespace tessera {

// Extents, dtypes, places and alignment; nothing has been written when this fails. What lies behind the
// pointers is not known: tensors come without their sizes.
Status validate(const RowSums& args, const Device& device);

}  // namespace tessera
