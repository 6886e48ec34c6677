// SPDX-License-Identifier: Apache-2.0
// A plan around one of the forward or the backward pass: the bias that its kernels read is a copy in
// the workspace, where bias/problem.h says so.
#include "core/workspace.h"
#include "cuda/common/launch.h"
#include "cuda/sm90/bias/pad.h"
#include "cuda/sm90/bias/problem.h"
#include "cuda/sm90/plan.h"

namespace tessera::cuda::sm90 {
namespace {

constexpr int kAlignment = 256;  // of pieces of the workspace, as of the whole

class PaddedBiasPlan final : public Plan {
 public:
  explicit PaddedBiasPlan(std::unique_ptr<Plan> inner) : inner_(std::move(inner)) {}

  int64_t workspace_bytes(const Problem& problem, int num_threads) const override {
    if (!pads_bias(problem)) return inner_->workspace_bytes(problem, num_threads);
    const Problem inner = with_padded_bias(problem);
    Workspace workspace;
    take_copy(inner, workspace);
    return (Count{workspace.bytes()} + inner_->workspace_bytes(inner, num_threads)).value();
  }

  Status run(const Problem& problem, const Buffers& buffers, const Device& device) const override {
    if (!pads_bias(problem)) return inner_->run(problem, buffers, device);
    const DeviceScope scope(device.ordinal);
    TESSERA_RETURN_IF_ERROR(scope.status());
    const Problem inner = with_padded_bias(problem);
    Workspace workspace(buffers.workspace);
    Buffers inside = buffers;
    inside.data[TESSERA_BIAS] = take_copy(inner, workspace);
    inside.workspace = static_cast<char*>(buffers.workspace) + workspace.bytes();
    inside.workspace_bytes = buffers.workspace_bytes - workspace.bytes();
    TESSERA_RETURN_IF_ERROR(launch_pad_bias(
        problem.tensor[TESSERA_BIAS], buffers.data[TESSERA_BIAS], inner.tensor[TESSERA_BIAS],
        inside.data[TESSERA_BIAS], static_cast<cudaStream_t>(buffers.stream)));
    return inner_->run(inner, inside, device);
  }

 private:
  // What is behind it begins at a multiple of kAlignment too.
  static void* take_copy(const Problem& inner, Workspace& workspace) {
    void* const copy =
        workspace.take<char>(bytes_of_padded(inner.tensor[TESSERA_BIAS]), kAlignment);
    workspace.take<char>(0, kAlignment);
    return copy;
  }

  std::unique_ptr<Plan> inner_;
};

}  // namespace

std::unique_ptr<Plan> plan_padded_bias(std::unique_ptr<Plan> inner) {
  return std::make_unique<PaddedBiasPlan>(std::move(inner));
}

}  // namespace tessera::cuda::sm90
