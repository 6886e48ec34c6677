// SPDX-License-Identifier: Apache-2.0
// The backend that takes whatever the specialised folders leave: any GPU, any alignment. Defined by
// the folder that is it, so that no folder includes another.
#pragma once

#include "core/choose/backend.h"

namespace tessera::cuda {

const Backend& general_backend();

// A plan that makes dq alone, and of it the tiles (64 rows of a head) alone in which some row has an
// lse, a natural logarithm, below `below`; it leaves the others as they are. Calls: what the rules of
// cudnn take of the backward pass, in bf16 or fp16, heads up to 256. Defined in the same folder.
Result<std::unique_ptr<Plan>> plan_dq_of_low_rows(const Problem& problem, const Device& device,
                                                  float below);

}  // namespace tessera::cuda
