// SPDX-License-Identifier: Apache-2.0
// The rules of tessera_merge and tessera_dropout_mask, and who computes them.
#pragma once

#include "core/choose.h"

namespace tessera {

// Shapes, dtypes, strides, pointers and overlap; nothing has been written when this fails.
Status validate(const MergeArgs& args);

// Sizes, dropout_p (0 is legal here: everything is kept) and pointers. Fills threshold.
Result<DropoutMaskArgs> dropout_mask_args(int64_t b, int64_t hq, int64_t sq, int64_t sk,
                                          double dropout_p, const int64_t* rng_state,
                                          uint8_t* keep);

// The first backend of this machine that owns the utilities of the device.
Result<const Backend*> choose_utilities(BackendList backends, const Device& device);

}  // namespace tessera
