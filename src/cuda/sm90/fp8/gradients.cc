// SPDX-License-Identifier: Apache-2.0
// The backward pass of precision="fp8": the quantiser, then the kernels of backward/ that multiply
// E4M3.
#include <algorithm>

#include "core/workspace.h"
#include "cuda/common/checks.h"
#include "cuda/common/launch.h"
#include "cuda/common/quantise/quantise.h"
#include "cuda/sm90/plan.h"

namespace tessera::cuda::sm90 {
namespace {

class Fp8Gradients final : public Plan {
 public:
  Fp8Gradients(std::unique_ptr<RoundedBackward> kernels, std::unique_ptr<Plan> fallback)
      : kernels_(std::move(kernels)), fallback_(std::move(fallback)) {}

  int64_t workspace_bytes(const Problem& problem, int num_threads) const override {
    Workspace workspace;
    take_rounded(problem, kPieces, workspace);
    const Count bytes = Count{workspace.bytes()} + kernels_->workspace_bytes(problem);
    return std::max(bytes.value(), fallback_->workspace_bytes(problem, num_threads));
  }

  Status run(const Problem& problem, const Buffers& buffers, const Device& device) const override {
    if (!kernels_->takes(problem, buffers)) return fallback_->run(problem, buffers, device);
    const DeviceScope scope(device.ordinal);
    TESSERA_RETURN_IF_ERROR(scope.status());
    const auto stream = static_cast<cudaStream_t>(buffers.stream);
    TESSERA_RETURN_IF_ERROR(report_checks(problem, buffers, stream));
    Workspace workspace(buffers.workspace);
    const Rounded rounded = take_rounded(problem, kPieces, workspace);
    TESSERA_RETURN_IF_ERROR(launch_quantise(problem, params_of(problem, buffers), rounded, stream));
    return kernels_->run(problem, buffers, rounded,
                         static_cast<char*>(buffers.workspace) + workspace.bytes());
  }

 private:
  static constexpr RoundedPieces kPieces{true, true};

  std::unique_ptr<RoundedBackward> kernels_;
  std::unique_ptr<Plan> fallback_;
};

}  // namespace

Result<std::unique_ptr<Plan>> plan_fp8_backward(const Problem& canonical, const Device& device,
                                                std::unique_ptr<Plan> fallback) {
  Result<std::unique_ptr<RoundedBackward>> kernels = plan_rounded_backward(canonical, device);
  if (!kernels.ok()) return kernels.status();
  return std::unique_ptr<Plan>(
      std::make_unique<Fp8Gradients>(std::move(kernels.value()), std::move(fallback)));
}

}  // namespace tessera::cuda::sm90
