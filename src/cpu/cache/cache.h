// SPDX-License-Identifier: Apache-2.0
// tessera_rotate and tessera_append on the CPU. Arguments are validated; nothing is allocated;
// context gives the threads.
#pragma once

#include "core/cache/append.h"
#include "core/cache/rotate.h"

namespace tessera::cpu {

void rotate(const RotateArgs& args, const Buffers& context);
void append(const AppendArgs& args, const Buffers& context);

}  // namespace tessera::cpu
