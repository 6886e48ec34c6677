// SPDX-License-Identifier: Apache-2.0
// The backward pass of precision="fp8": the quantiser, then the kernels of backward/ that multiply
// E4M3. The plan of cuda_sm80 would want 3 times the columns in fp32 for a call whose tensors TMA
// does not reach: such a call has copies in 16 bits instead.
#include "core/workspace.h"
#include "cuda/common/checks.h"
#include "cuda/common/launch.h"
#include "cuda/common/merge/merge.h"
#include "cuda/common/quantise/quantise.h"
#include "cuda/sm90/plan.h"

namespace tessera::cuda::sm90 {
namespace {

class Fp8Gradients final : public Plan {
 public:
  explicit Fp8Gradients(std::unique_ptr<RoundedBackward> kernels) : kernels_(std::move(kernels)) {}

  int64_t workspace_bytes(const Problem& problem, int) const override {
    const Pieces pieces = take_pieces(problem, nullptr);
    return (Count{pieces.bytes} + kernels_->workspace_bytes(problem)).value();
  }

  Status run(const Problem& problem, const Buffers& buffers, const Device& device) const override {
    const DeviceScope scope(device.ordinal);
    TESSERA_RETURN_IF_ERROR(scope.status());
    const auto stream = static_cast<cudaStream_t>(buffers.stream);
    TESSERA_RETURN_IF_ERROR(report_checks(problem, buffers, stream));
    const Pieces pieces = take_pieces(problem, buffers.workspace);
    void* const workspace = static_cast<char*>(buffers.workspace) + pieces.bytes;
    TESSERA_RETURN_IF_ERROR(
        launch_quantise(problem, params_of(problem, buffers), pieces.rounded, stream));
    if (kernels_->takes(problem, buffers)) {
      return kernels_->run(problem, buffers, pieces.rounded, workspace);
    }
    const Problem inner = problem_of_copies(problem);
    Buffers inside = buffers;
    for (const int index : kCopied) {
      if (!given(problem, index)) continue;
      inside.data[index] = pieces.copy[index];
      if (is_output(problem, index)) continue;
      TESSERA_RETURN_IF_ERROR(launch_copy(problem, buffers, inner, inside, index, stream));
    }
    TESSERA_RETURN_IF_ERROR(kernels_->run(inner, inside, pieces.rounded, workspace));
    for (const int index : kCopied) {
      if (!given(problem, index) || !is_output(problem, index)) continue;
      TESSERA_RETURN_IF_ERROR(launch_copy(inner, inside, problem, buffers, index, stream));
    }
    return {};
  }

 private:
  static constexpr int kAlignment = 256;
  // All that the kernels read and write in 16 bits: of v there is E4M3 alone.
  static constexpr int kCopied[] = {TESSERA_Q,  TESSERA_K,  TESSERA_O, TESSERA_DO,
                                    TESSERA_DQ, TESSERA_DK, TESSERA_DV};

  struct Pieces {
    Rounded rounded;
    char* copy[TESSERA_NUM_TENSORS] = {};
    int64_t bytes = 0;
  };
  static Pieces take_pieces(const Problem& problem, void* base) {
    Workspace workspace(base);
    Pieces pieces;
    pieces.rounded = take_rounded(problem, {true, true}, workspace);
    for (const int index : kCopied) {
      if (!given(problem, index)) continue;
      const Tensor dense = copy_of(problem.tensor[index]);
      pieces.copy[index] = workspace.take<char>(bytes_of(dense), kAlignment);
    }
    workspace.take<char>(0, kAlignment);
    pieces.bytes = workspace.bytes();
    return pieces;
  }

  static Tensor copy_of(const Tensor& t) { return dense_like(t, t.dtype); }
  static Problem problem_of_copies(const Problem& problem) {
    Problem inner = problem;
    for (const int index : kCopied) {
      if (given(problem, index)) inner.tensor[index] = copy_of(problem.tensor[index]);
    }
    inner.flags &= ~uint32_t{TESSERA_V_IN_K};
    return inner;
  }

  std::unique_ptr<RoundedBackward> kernels_;
};

}  // namespace

Result<std::unique_ptr<Plan>> plan_fp8_backward(const Problem& canonical, const Device& device) {
  Result<std::unique_ptr<RoundedBackward>> kernels = plan_rounded_backward(canonical, device);
  if (!kernels.ok()) return kernels.status();
  return std::unique_ptr<Plan>(std::make_unique<Fp8Gradients>(std::move(kernels.value())));
}

}  // namespace tessera::cuda::sm90
