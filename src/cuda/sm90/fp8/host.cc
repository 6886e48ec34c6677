// SPDX-License-Identifier: Apache-2.0
// The host side of the fp8 forward pass: V^T, tensor maps, the order of tiles, the launch.
#include <span>

#include "core/log.h"
#include "core/workspace.h"
#include "cuda/common/checks.h"
#include "cuda/common/launch.h"
#include "cuda/common/merge/merge.h"
#include "cuda/common/quantise/quantise.h"
#include "cuda/sm90/fp8/choice.h"
#include "cuda/sm90/fp8/params.h"
#include "cuda/sm90/fp8/transpose.h"
#include "cuda/sm90/machine/tensormap.h"
#include "cuda/sm90/plan.h"

namespace tessera::cuda::sm90 {
namespace {

constexpr int kAlignment = 256;  // of V^T
constexpr int kRowsOfConsumer = 64;

Status map_of_transposed(const Problem& problem, const void* base, int box_rows, CUtensorMap* map) {
  const Sizes s = sizes_of(problem);
  const int64_t keys = transposed_keys(problem).value();
  const MapShape shape{.type = {},
                       .head_dim = keys,
                       .heads = s.hk,
                       .rows = s.dv,
                       .batch = is_thd_k(problem) ? 1 : s.batch,
                       .stride_head = keys * s.dv,
                       .stride_row = keys,
                       .stride_batch = keys * s.dv * s.hk,
                       .box_rows = box_rows,
                       .reach = 0};
  return make_tensor_map(in_pairs(shape), base, map);
}

class Fp8Plan final : public Plan {
 public:
  Fp8Plan(int multiprocessors, std::unique_ptr<Plan> fallback)
      : multiprocessors_(multiprocessors), fallback_(std::move(fallback)) {}

  int64_t workspace_bytes(const Problem& problem, int num_threads) const override {
    Workspace workspace;
    take_workspace(problem, workspace);
    return std::max(workspace.bytes(), fallback_->workspace_bytes(problem, num_threads));
  }

  Status run(const Problem& problem, const Buffers& buffers, const Device& device) const override {
    if (!takes(problem, buffers)) return fallback_->run(problem, buffers, device);
    const DeviceScope scope(device.ordinal);
    TESSERA_RETURN_IF_ERROR(scope.status());
    const auto stream = static_cast<cudaStream_t>(buffers.stream);
    TESSERA_RETURN_IF_ERROR(report_checks(problem, buffers, stream));
    const Fp8Kernel& kernel = fp8_kernel_of(problem, multiprocessors_);
    Workspace workspace(buffers.workspace);
    const Pieces pieces = take_workspace(problem, workspace);
    Fp8Params a{};
    if (is_rounded(problem)) {
      const Params params = params_of(problem, buffers);
      const ValuesByColumns values = values_of(problem, pieces.transposed);
      TESSERA_RETURN_IF_ERROR(launch_quantise(problem, params, pieces.rounded, stream, &values));
      a.rounded = pieces.rounded;
      return run_kernel(kernel, problem_of_rounded(problem), buffers_of_rounded(buffers, a.rounded),
                        pieces, a);
    }
    return run_kernel(kernel, problem, buffers, pieces, a);
  }

 private:
  struct Pieces {
    TileCounter* counter;
    char* transposed;
    Rounded rounded;
  };
  static Pieces take_workspace(const Problem& problem, Workspace& workspace) {
    Pieces pieces{workspace.take<TileCounter>(1), nullptr, {}};
    pieces.transposed = workspace.take<char>(transposed_bytes(problem), kAlignment);
    if (is_rounded(problem)) pieces.rounded = take_rounded(problem, {false, false}, workspace);
    return pieces;
  }

  static ValuesByColumns values_of(const Problem& problem, char* to) {
    const Sizes s = sizes_of(problem);
    const int64_t keys = transposed_keys(problem).value();
    return {reinterpret_cast<uint8_t*>(to), keys * s.dv, keys * s.dv * s.hk,
            static_cast<int>(keys)};
  }

  // What the kernel reads of a problem that is rounded here.
  static Problem problem_of_rounded(const Problem& problem) {
    Problem inner = problem;
    for (const int index : {TESSERA_Q, TESSERA_K, TESSERA_V}) {
      inner.tensor[index] = rounded_like(problem.tensor[index]);
    }
    return inner;
  }
  static Buffers buffers_of_rounded(const Buffers& buffers, const Rounded& rounded) {
    Buffers inner = buffers;
    inner.data[TESSERA_Q] = rounded.q;
    inner.data[TESSERA_K] = rounded.k;
    inner.data[TESSERA_V] = nullptr;  // there is V^T alone
    return inner;
  }

  Status run_kernel(const Fp8Kernel& kernel, const Problem& problem, const Buffers& buffers,
                    const Pieces& pieces, Fp8Params& a) const {
    const auto stream = static_cast<cudaStream_t>(buffers.stream);
    static_cast<ForwardParams&>(a) = forward_params(problem, buffers);
    TESSERA_RETURN_IF_ERROR(map_of(problem, buffers, TESSERA_Q, kRowsOfConsumer, 0, &a.q));
    TESSERA_RETURN_IF_ERROR(map_of(problem, buffers, TESSERA_K, Fp8Tile::tile_n, 0, &a.k));
    TESSERA_RETURN_IF_ERROR(map_of_transposed(problem, pieces.transposed, kernel.tile.dv, &a.v));
    const auto view = [&](int index) {
      return view_of(problem.tensor[index], buffers.data[index]);
    };
    a.q_scale = view(TESSERA_Q_SCALE);
    a.k_scale = view(TESSERA_K_SCALE);
    a.v_scale = view(TESSERA_V_SCALE);
    if (given(problem, TESSERA_AMAX_O)) {
      auto* const amax = static_cast<float*>(buffers.data[TESSERA_AMAX_O]);
      a.amax_o = reinterpret_cast<uint32_t*>(amax);
      TESSERA_RETURN_IF_ERROR(launch_fill(amax, 1, 1, 0, stream));
    }
    const int64_t blocks = problem.tensor[TESSERA_Q_SCALE].extent[2];
    a.q_scale_block = blocks > 1 ? problem.q_scale_block : 0;
    a.last_q_block = static_cast<int>(std::max<int64_t>(blocks, 1) - 1);
    const int workers = multiprocessors_for(buffers, multiprocessors_);
    order_tiles(kernel.tile.tile_m(), workers, pieces.counter, a, true);
    TESSERA_RETURN_IF_ERROR(clear_max_logit(a, stream));
    if (!is_rounded(problem)) {
      TESSERA_RETURN_IF_ERROR(launch_transpose(problem, a.problem, pieces.transposed, stream));
    }
    return launch_overlapping(kernel.name, kernel.code->function,
                              dim3(static_cast<unsigned>(std::min(a.tiles, workers))),
                              kernel.tile.threads(), kernel.code->shared_bytes, &a, stream);
  }

  // The tensors of the kernel lie where TMA and accesses of 16 bytes reach them, and exponents hold
  // the scale.
  static bool takes(const Problem& problem, const Buffers& buffers) {
    constexpr int kTensors[] = {TESSERA_Q, TESSERA_K, TESSERA_V, TESSERA_O}, kO[] = {TESSERA_O};
    const std::span<const int> of_kernel =
        is_rounded(problem) ? std::span<const int>(kO) : kTensors;
    for (const int index : of_kernel) {
      if (reinterpret_cast<uintptr_t>(buffers.data[index]) % 16 == 0) continue;
      if (log_enabled(Topic::kDispatch)) {
        log(Topic::kDispatch,
            "cuda_sm90 leaves this call to cuda_sm80: %s=%p: must be a multiple of 16",
            tensor_rule(index).name, buffers.data[index]);
      }
      return false;
    }
    const double scale = softmax_scale_of(problem, buffers);
    if (!is_rounded(problem) || !is_steep(scale)) return true;
    if (log_enabled(Topic::kDispatch)) {
      log(Topic::kDispatch,
          "cuda_sm90 leaves this call to cuda_sm80: softmax_scale=%g: is too large", scale);
    }
    return false;
  }

  int multiprocessors_;
  std::unique_ptr<Plan> fallback_;
};

}  // namespace

Result<std::unique_ptr<Plan>> plan_fp8_forward(const Problem& canonical, const Device& device,
                                               std::unique_ptr<Plan> fallback) {
  const Result<DeviceInfo> info = device_info(device.ordinal);
  if (!info.ok()) return info.status();
  const DeviceScope scope(device.ordinal);
  TESSERA_RETURN_IF_ERROR(scope.status());
  const Sizes s = sizes_of(canonical);
  for (const int dtype_of_o : {TESSERA_BF16, TESSERA_FP16}) {
    for (const auto& [exact_sum, consumers] :
         {std::pair{false, 2}, {false, 3}, {true, 2}, {true, 3}}) {
      const Fp8Kernel* kernel =
          find_fp8_kernel({dtype_of_o, exact_sum, is_rounded(canonical)}, s.dqk, s.dv, consumers);
      if (!kernel) continue;
      TESSERA_RETURN_IF_ERROR(cuda_status(
          cudaFuncSetAttribute(kernel->code->function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               kernel->code->shared_bytes),
          "cudaFuncSetAttribute"));
    }
  }
  return std::unique_ptr<Plan>(
      std::make_unique<Fp8Plan>(info.value().multiprocessors, std::move(fallback)));
}

}  // namespace tessera::cuda::sm90
