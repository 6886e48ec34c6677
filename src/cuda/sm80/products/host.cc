// SPDX-License-Identifier: Apache-2.0
// A plan around the plan of the problem with columns more (products/problem.h).
#include <algorithm>

#include "core/problem/scales.h"
#include "core/workspace.h"
#include "cuda/common/merge/merge.h"
#include "cuda/common/quantise/quantise.h"
#include "cuda/sm80/convert/rows.h"
#include "cuda/sm80/plan.h"
#include "cuda/sm80/products/problem.h"
#include "cuda/sm80/products/rows.h"

namespace tessera::cuda::sm80 {
namespace {

constexpr int kAlignment = 256;  // of pieces of the workspace, as of the whole

class ProductsPlan final : public Plan {
 public:
  ProductsPlan(std::unique_ptr<Plan> inner, int64_t widest)
      : inner_(std::move(inner)), widest_(widest) {}

  int64_t workspace_bytes(const Problem& problem, int num_threads) const override {
    const Problem inner = wide_problem(problem, wide_columns(problem, widest_));
    const Pieces pieces = take_pieces(problem, inner, nullptr);
    return (Count{pieces.bytes} + inner_->workspace_bytes(inner, num_threads)).value();
  }

  Status run(const Problem& problem, const Buffers& buffers, const Device& device) const override {
    const DeviceScope scope(device.ordinal);
    TESSERA_RETURN_IF_ERROR(scope.status());
    const auto stream = static_cast<cudaStream_t>(buffers.stream);
    const WideColumns columns = wide_columns(problem, widest_);
    const Problem inner = wide_problem(problem, columns);
    const Pieces pieces = take_pieces(problem, inner, buffers.workspace);
    const Params params = params_of(problem, buffers);
    TESSERA_RETURN_IF_ERROR(launch_quantise(problem, params, pieces.rounded, stream));
    Buffers inside = buffers;
    inside.workspace = static_cast<char*>(buffers.workspace) + pieces.bytes;
    inside.workspace_bytes = buffers.workspace_bytes - pieces.bytes;
    inside.softmax_scale = softmax_scale_of(problem, buffers);
    for (const int index : kScaledTensors) {
      if (has_copy(problem, index)) inside.data[index] = pieces.data[index];
    }
    if (copies_bias(problem)) {
      inside.data[TESSERA_BIAS] = pieces.data[TESSERA_BIAS];
      inside.data[TESSERA_DBIAS] = pieces.data[TESSERA_DBIAS];
      TESSERA_RETURN_IF_ERROR(launch_copy(problem, buffers, inner, inside, TESSERA_BIAS, stream));
    }
    const auto view = [&](int index) { return view_of(inner.tensor[index], pieces.data[index]); };
    for (int pass = 0; pass < columns.passes; ++pass) {
      for (const int index : kScaledTensors) {
        if (!has_copy(problem, index) || is_output(problem, index)) continue;
        TESSERA_RETURN_IF_ERROR(launch_wide(problem, params, pieces.rounded, columns, pass, index,
                                            view(index), stream));
      }
      TESSERA_RETURN_IF_ERROR(inner_->run(inner, inside, device));
      for (const int index : kScaledTensors) {
        if (!has_copy(problem, index) || !is_output(problem, index)) continue;
        View from = view(index);
        const ColumnPart part = part_of(problem, columns, pass, index, from);
        TESSERA_RETURN_IF_ERROR(launch_narrow(problem, buffers, index, from, part, stream));
      }
    }
    if (!copies_bias(problem) || !given(problem, TESSERA_DBIAS)) return {};
    return launch_copy(inner, inside, problem, buffers, TESSERA_DBIAS, stream);
  }

 private:
  struct Pieces {
    Rounded rounded;
    void* data[TESSERA_NUM_TENSORS] = {};
    int64_t bytes = 0;
  };
  static bool has_copy(const Problem& problem, int index) {
    return given(problem, index) && (index != TESSERA_O || copies_o(problem));
  }
  static Pieces take_pieces(const Problem& problem, const Problem& inner, void* base) {
    Workspace workspace(base);
    Pieces pieces;
    // An fp8 do is rounded already.
    const bool rounds_do = is_backward(problem) && !is_fp8(problem.tensor[TESSERA_DO].dtype);
    pieces.rounded = take_rounded(problem, {rounds_do, true}, workspace);
    for (const int index : kScaledTensors) {
      if (!has_copy(problem, index)) continue;
      pieces.data[index] = workspace.take<char>(bytes_of(inner.tensor[index]), kAlignment);
    }
    for (const int index : {TESSERA_BIAS, TESSERA_DBIAS}) {
      if (!copies_bias(problem) || !given(problem, index)) continue;
      pieces.data[index] = workspace.take<char>(bytes_of(inner.tensor[index]), kAlignment);
    }
    workspace.take<char>(0, kAlignment);
    pieces.bytes = workspace.bytes();
    return pieces;
  }

  // Which columns of a result a pass has made; moves `from` to them.
  static ColumnPart part_of(const Problem& problem, const WideColumns& c, int pass, int index,
                            View& from) {
    const int64_t all = problem.tensor[index].extent[3];
    if (index == TESSERA_O) return {0, all};
    const bool is_v = index == TESSERA_DV;
    const int64_t own = is_v ? c.own_v : c.own_k, first = own * pass;
    const int64_t at = is_v ? c.first_do : c.first_q + (index == TESSERA_DQ ? own : 0);
    from.data = static_cast<float*>(from.data) + at;
    return {first, std::clamp<int64_t>(all - first, 0, own)};
  }

  std::unique_ptr<Plan> inner_;
  int64_t widest_;
};

}  // namespace

Result<std::unique_ptr<Plan>> plan_products(const Problem& canonical, const Device& device) {
  const int64_t widest = widest_head(canonical, traits_of_device(device).shared_bytes);
  const Problem inner = wide_problem(canonical, wide_columns(canonical, widest));
  Result<std::unique_ptr<Plan>> plan =
      is_backward(inner) ? plan_backward(inner, device) : plan_forward(inner, device);
  if (!plan.ok()) return plan.status();
  return std::unique_ptr<Plan>(std::make_unique<ProductsPlan>(std::move(plan.value()), widest));
}

}  // namespace tessera::cuda::sm80
