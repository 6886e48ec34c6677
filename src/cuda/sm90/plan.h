// SPDX-License-Identifier: Apache-2.0
// How sm90 runs a problem.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <span>

#include "core/choose/backend.h"
#include "core/workspace.h"
#include "cuda/common/quantise/rounded.h"
#include "cuda/sm90/decode/choice.h"
#include "cuda/sm90/forward/choice.h"
#include "cuda/sm90/forward/params.h"
#include "cuda/sm90/wide/kernels.h"

namespace tessera::cuda::sm90 {

// True if the forward kernels take this call: TMA can address its q, k, v and o, their exponents
// can hold its scale, and their tanh its cap. Strides are rules of support; addresses are only
// known in run(). Says why not through TESSERA_LOG=dispatch.
bool takes_call(const Problem& problem, const Buffers& buffers);

// True if TMA can address these tensors of the call, as far as they are given. Says why not, too.
bool can_address(const Problem& problem, const Buffers& buffers, std::span<const int> indices);

// True if tanh as the kernels of both passes have it is right enough for the call's cap. Says why
// not, too.
bool can_cap(const Problem& problem, const Buffers& buffers);

// All that does not depend on the kernel.
ForwardParams forward_params(const Problem& problem, const Buffers& buffers);

// Queues the start of max_logit, where it is asked for.
Status clear_max_logit(const ForwardParams& a, cudaStream_t stream);

// The order in which tiles of tile_m rows are handed out to so many CTAs or clusters, by a counter
// where there are more. asks_late: a CTA with long tiles in hand asks for no others.
void order_tiles(int tile_m, int workers, TileCounter* counter, ForwardParams& a,
                 bool asks_late = false, int heads_of_tile = 1);

// fallback: runs the calls that takes_call() refuses.
Result<std::unique_ptr<Plan>> plan_forward(const Problem& canonical, const Device& device,
                                           std::unique_ptr<Plan> fallback);

// A plan that lets `inner`, of one of plan_forward() or plan_backward(), read a copy of the bias
// where pads_bias() (bias/problem.h) says so, and else runs it as it is.
std::unique_ptr<Plan> plan_padded_bias(std::unique_ptr<Plan> inner);

Result<std::unique_ptr<Plan>> plan_wide_forward(const Problem& canonical, const Device& device,
                                                std::unique_ptr<Plan> fallback);

Result<std::unique_ptr<Plan>> plan_fp8_forward(const Problem& canonical, const Device& device,
                                               std::unique_ptr<Plan> fallback);

// True of the types and head dims of latent attention.
bool has_mla_head_dims(const Problem& canonical);

// general: runs the calls of latent attention that takes_call() refuses; other: the problems of the
// same types and head dims that are not runs_in_mla(), if there are any.
Result<std::unique_ptr<Plan>> plan_mla(const Problem& canonical, const Device& device,
                                       std::unique_ptr<Plan> general, std::unique_ptr<Plan> other);

// True if the kernels for decoding have these types and head dims.
bool has_decode_kernel(const Problem& canonical);

// general: runs the calls for decoding that takes_call() refuses; other: the problems of the same
// types and head dims that are not runs_in_decode(), if there are any.
Result<std::unique_ptr<Plan>> plan_decode(const Problem& canonical, const Device& device,
                                          std::unique_ptr<Plan> general,
                                          std::unique_ptr<Plan> other);

// The decoding steps of a batch whose prompts another kernel computes (decode/choice.h). The kernels are
// those that plan_decode() has prepared; the device is current.
void take_workspace_of_steps(const Problem& problem, const DecodeKernel& kernel,
                             int multiprocessors, Workspace& workspace);
Status run_steps(const Problem& problem, const Buffers& buffers, const DecodeKernel& kernel,
                 int multiprocessors, Workspace& workspace);

Result<std::unique_ptr<Plan>> plan_backward(const Problem& canonical, const Device& device,
                                            std::unique_ptr<Plan> fallback);

// The backward pass of 16-bit tensors by products of E4M3, of problems that has_rounded_backward()
// (backward/choice.h). Whoever calls it has rounded q, k, v and do by kernels before it in the
// stream.
class RoundedBackward {
 public:
  virtual ~RoundedBackward() = default;

  // The bytes that it needs itself; Rounded has its own.
  virtual int64_t workspace_bytes(const Problem& problem) const = 0;
  // True if TMA can address the call's 16-bit tensors. Says why not, too.
  virtual bool takes(const Problem& problem, const Buffers& buffers) const = 0;
  // Queues all of it. The device is current; workspace is aligned to 16 bytes.
  virtual Status run(const Problem& problem, const Buffers& buffers, const Rounded& rounded,
                     void* workspace) const = 0;
};
Result<std::unique_ptr<RoundedBackward>> plan_rounded_backward(const Problem& canonical,
                                                               const Device& device);

// The same behind the quantiser.
Result<std::unique_ptr<Plan>> plan_fp8_backward(const Problem& canonical, const Device& device);

}  // namespace tessera::cuda::sm90
