// SPDX-License-Identifier: Apache-2.0
// Tensors that tests describe.
#pragma once

#include <algorithm>
#include <initializer_list>

#include "tessera.h"

// A contiguous tensor in C order; axes beyond those given have extent 1.
inline tessera_tensor tensor(int32_t dtype, std::initializer_list<int64_t> extent) {
  tessera_tensor t{};
  t.dtype = dtype;
  std::fill(t.extent, t.extent + 4, 1);
  std::copy(extent.begin(), extent.end(), t.extent);
  int64_t stride = 1;
  for (int axis = static_cast<int>(extent.size()) - 1; axis >= 0; --axis) {
    t.stride[axis] = stride;
    stride *= t.extent[axis];
  }
  return t;
}
