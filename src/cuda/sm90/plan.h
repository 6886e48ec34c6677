// SPDX-License-Identifier: Apache-2.0
// How the sm90 room runs a problem.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <memory>

#include "core/backend.h"
#include "cuda/sm90/kernels.h"
#include "cuda/sm90/wide_kernels.h"

namespace tessera::cuda::sm90 {

// The kernel that knows the features (of Feature) and has the least head dims of those that hold
// these; the first such row of the table whose tiles have at most so many consumers. Null: none.
const Kernel* find_kernel(uint32_t features, int dtype, int64_t dqk, int64_t dv,
                          int most_consumers = 3);

// Whether the forward kernels take this call: TMA its q, k, v and o, and their exponents its scale.
// Strides are rules of support; addresses are only known in run().
bool takes_call(const Problem& problem, const Buffers& buffers);

// All that does not depend on the kernel.
ForwardParams forward_params(const Problem& problem, const Buffers& buffers);

// Queues the start of max_logit, where it is asked for.
Status clear_max_logit(const ForwardParams& a, cudaStream_t stream);

// The order in which tiles of tile_m rows are handed out to so many CTAs or clusters, by a counter
// at the beginning of the workspace. asks_late: a CTA with long tiles in hand asks for no others.
void order_tiles(int tile_m, int workers, const Buffers& buffers, ForwardParams& a,
                 bool asks_late = false);

// fallback: runs the calls that takes_call() refuses.
Result<std::unique_ptr<Plan>> plan_forward(const Problem& canonical, const Device& device,
                                           std::unique_ptr<Plan> fallback);

// Head dims beyond those of find_kernel(): a kernel of their own, without features.
constexpr int64_t kWideBeyond = 256;
inline bool is_wide(const Sizes& s) { return std::max(s.dqk, s.dv) > kWideBeyond; }

// The kernel with the least head dims of those that hold these, for clusters of so many CTAs; null:
// none.
const WideKernel* find_wide_kernel(int dtype, int64_t dqk, int64_t dv, int ctas = 2);

Result<std::unique_ptr<Plan>> plan_wide_forward(const Problem& canonical, const Device& device,
                                                std::unique_ptr<Plan> fallback);

// What the backward pass asks beyond dtypes, strides and sizes.
void require_backward(Support& support, const Problem& problem);

Result<std::unique_ptr<Plan>> plan_backward(const Problem& canonical, const Device& device,
                                            std::unique_ptr<Plan> fallback);

}  // namespace tessera::cuda::sm90
