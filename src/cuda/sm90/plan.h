// SPDX-License-Identifier: Apache-2.0
// How the sm90 room runs a problem.
#pragma once

#include <memory>

#include "core/backend.h"
#include "cuda/sm90/kernels.h"

namespace tessera::cuda::sm90 {

// The kernel that knows the features (of Feature) and has the least head dims of those that hold
// these; the first such row of the table whose tiles have at most so many consumers. Null: none.
const Kernel* find_kernel(uint32_t features, int dtype, int64_t dqk, int64_t dv,
                          int most_consumers = 3);

// fallback: runs the same problems when a base address is not what TMA wants.
Result<std::unique_ptr<Plan>> plan_forward(const Problem& canonical, const Device& device,
                                           std::unique_ptr<Plan> fallback);

// What the backward pass asks beyond dtypes, strides and sizes.
void require_backward(Support& support, const Problem& problem);

Result<std::unique_ptr<Plan>> plan_backward(const Problem& canonical, const Device& device,
                                            std::unique_ptr<Plan> fallback);

}  // namespace tessera::cuda::sm90
