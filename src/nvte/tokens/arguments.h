// SPDX-License-Identifier: Apache-2.0
// What functions on tokens ask of their tensors.
#pragma once

#include "nvte/device.h"
#include "nvte/tensor.h"

namespace tessera::nvte {

// A tensor with data, of so many axes.
const Tensor& with_data(NVTETensor handle, const char* name, int64_t axes);

// int32 or int64 of at least `numel`; of any number of axes.
Integers integers(NVTETensor handle, const char* name, int64_t numel);

// Rows of `bytes`, and the largest pieces that they and both memories allow.
Rows pieces_of(int64_t bytes, const void* a, const void* b);

}  // namespace tessera::nvte
