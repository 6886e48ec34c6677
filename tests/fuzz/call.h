// SPDX-License-Identifier: Apache-2.0
// One call of attention, spoilt by the bytes of an input and made in every way that the C interface
// has: whatever they say, it is OK or one clear error, and nothing is written but outputs.
#pragma once

#include "fuzz/bytes.h"
#include "tessera.h"

namespace fuzz {

struct Call {
  tessera_problem problem{};
  tessera_buffers buffers{};  // scalars; pointers are made by make()
  tessera_device device{};
  // Tensors of one memory: whose it is, and the elements before each.
  int owner[TESSERA_NUM_TENSORS];
  int64_t offset[TESSERA_NUM_TENSORS] = {};

  Call();
  // Edits until the bytes say that the rest is data.
  void spoil(Bytes& bytes);
  void make(Bytes& bytes);
};

}  // namespace fuzz
