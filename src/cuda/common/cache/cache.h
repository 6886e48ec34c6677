// SPDX-License-Identifier: Apache-2.0
// tessera_rotate and tessera_append on a GPU: one launch, nothing allocated, nothing read on the
// host, so that a captured call follows lengths and tables that change.
#pragma once

#include "core/cache/append.h"
#include "core/cache/rotate.h"

namespace tessera::cuda {

Status rotate(const RotateArgs& args, const Buffers& context, const Device& device);
Status append(const AppendArgs& args, const Buffers& context, const Device& device);

}  // namespace tessera::cuda
