// SPDX-License-Identifier: Apache-2.0
// The rules of tessera_rotate.
#pragma once

#include "core/problem/problem.h"

namespace tessera {

using RotateArgs = tessera_rotate_args;

// Shapes, dtypes, strides, pointers and overlap, and on the CPU the values of positions; nothing
// has been written when this fails.
Status validate(const RotateArgs& args, const Device& device);

// The caller's struct as this library knows it.
Result<const RotateArgs*> import_rotate(const tessera_rotate_args* caller, RotateArgs& storage);

// The position of row i of sequence n. The arguments are validated.
int64_t position_of(const RotateArgs& args, int64_t n, int64_t i);

}  // namespace tessera
