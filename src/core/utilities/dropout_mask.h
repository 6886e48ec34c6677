// SPDX-License-Identifier: Apache-2.0
// The rules of tessera_dropout_mask_at.
#pragma once

#include "core/choose/backend.h"

namespace tessera {

// What a caller gives, as it came.
struct DropoutMaskCall {
  int64_t b, hq, sq, sk;
  double dropout_p;  // 0 is legal here: everything is kept
  const int64_t* rng_state;
  int32_t rng_words;
  const int64_t *q_start, *k_start;
  uint8_t* keep;
};

// Sizes, dropout_p and pointers, and on the CPU the values of starts. Fills threshold.
Result<DropoutMaskArgs> dropout_mask_args(const DropoutMaskCall& call, const Device& device);

}  // namespace tessera
