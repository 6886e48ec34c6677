// SPDX-License-Identifier: Apache-2.0
// How sm80 runs a problem: which kernels, cut how, with what workspace.
#pragma once

#include <algorithm>
#include <memory>

#include "core/choose/backend.h"
#include "cuda/common/checks.h"
#include "cuda/common/launch.h"
#include "cuda/sm80/choice.h"

namespace tessera::cuda::sm80 {

// Allows the kernel its shared memory on the current device; refuses null.
Status prepare(const Kernel* kernel);

// The same for all that the set has.
Status prepare_all(const KernelSet& kernels);

// Queues a kernel whose only argument is *args.
Status launch(const Kernel& kernel, dim3 grid, const void* args, cudaStream_t stream);

constexpr int64_t kSectionBytes = int64_t{64} << 20;  // of L2, for a section of heads

// Heads whose tiles begin side by side (machine/place.cuh): as many as `bytes`, some of L2, hold of
// what each reads.
inline int section_of(int64_t bytes, int64_t heads, int64_t bytes_a_head) {
  return static_cast<int>(std::clamp<int64_t>(bytes / std::max<int64_t>(bytes_a_head, 1), 1,
                                              std::max<int64_t>(heads, 1)));
}

Result<std::unique_ptr<Plan>> plan_forward(const Problem& canonical, const Device& device);
Result<std::unique_ptr<Plan>> plan_backward(const Problem& canonical, const Device& device);
// The plan of a problem that runs in fp32 because is_converted() (convert/problem.h) says so.
Result<std::unique_ptr<Plan>> plan_converted(const Problem& canonical, const Device& device);

// The plan of a problem that is_rounded() (products/problem.h).
Result<std::unique_ptr<Plan>> plan_products(const Problem& canonical, const Device& device);

}  // namespace tessera::cuda::sm80
