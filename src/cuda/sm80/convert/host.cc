// SPDX-License-Identifier: Apache-2.0
// A plan around the plan of the fp32 problem: q, k, v, do and what backward reads of o become fp32,
// and results are rounded on the way out. Copies are O(tokens); scales are read by kernels alone.
#include "core/problem/scales.h"
#include "core/workspace.h"
#include "cuda/sm80/convert/problem.h"
#include "cuda/sm80/convert/rows.h"
#include "cuda/sm80/plan.h"

namespace tessera::cuda::sm80 {
namespace {

constexpr int kAlignment = 256;  // of pieces of the workspace, as of the whole

class ConvertedPlan final : public Plan {
 public:
  explicit ConvertedPlan(std::unique_ptr<Plan> inner) : inner_(std::move(inner)) {}

  int64_t workspace_bytes(const Problem& problem, int num_threads) const override {
    const Problem inner = problem_of_kernels(problem);
    const Copies copies = take_copies(problem, inner, nullptr);
    return (Count{copies.bytes} + inner_->workspace_bytes(inner, num_threads)).value();
  }

  Status run(const Problem& problem, const Buffers& buffers, const Device& device) const override {
    const DeviceScope scope(device.ordinal);
    TESSERA_RETURN_IF_ERROR(scope.status());
    const auto stream = static_cast<cudaStream_t>(buffers.stream);
    const Problem inner = problem_of_kernels(problem);
    const Copies copies = take_copies(problem, inner, buffers.workspace);
    Buffers inside = buffers;
    inside.workspace = static_cast<char*>(buffers.workspace) + copies.bytes;
    inside.workspace_bytes = buffers.workspace_bytes - copies.bytes;
    for (const int index : kScaledTensors) {
      if (!has_copy(problem, index)) continue;
      inside.data[index] = copies.data[index];
      if (is_output(problem, index)) continue;
      const View to = view_of(inner.tensor[index], copies.data[index]);
      TESSERA_RETURN_IF_ERROR(launch_widen(problem, buffers, index, to, stream));
    }
    TESSERA_RETURN_IF_ERROR(inner_->run(inner, inside, device));
    for (const int index : kScaledTensors) {
      if (!has_copy(problem, index) || !is_output(problem, index)) continue;
      const View from = view_of(inner.tensor[index], copies.data[index]);
      TESSERA_RETURN_IF_ERROR(launch_narrow(problem, buffers, index, from,
                                            {0, problem.tensor[index].extent[3]}, stream));
    }
    return {};
  }

 private:
  struct Copies {
    void* data[TESSERA_NUM_TENSORS] = {};
    int64_t bytes = 0;
  };
  static Copies take_copies(const Problem& problem, const Problem& inner, void* base) {
    Workspace workspace(base);
    Copies copies;
    for (const int index : kScaledTensors) {
      if (!has_copy(problem, index)) continue;
      copies.data[index] = workspace.take<char>(bytes_of(inner.tensor[index]), kAlignment);
    }
    workspace.take<char>(0, kAlignment);
    copies.bytes = workspace.bytes();
    return copies;
  }

  std::unique_ptr<Plan> inner_;
};

}  // namespace

Result<std::unique_ptr<Plan>> plan_converted(const Problem& canonical, const Device& device) {
  const Problem inner = problem_of_kernels(canonical);
  Result<std::unique_ptr<Plan>> plan =
      is_backward(inner) ? plan_backward(inner, device) : plan_forward(inner, device);
  if (!plan.ok()) return plan.status();
  return std::unique_ptr<Plan>(std::make_unique<ConvertedPlan>(std::move(plan.value())));
}

}  // namespace tessera::cuda::sm80
