// SPDX-License-Identifier: Apache-2.0
// The rules of tessera_merge.
#pragma once

#include "core/choose/backend.h"

namespace tessera {

// Shapes, dtypes, strides, pointers and overlap; nothing has been written when this fails.
Status validate(const MergeArgs& args);

}  // namespace tessera
