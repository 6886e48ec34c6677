// SPDX-License-Identifier: Apache-2.0
#include "cuda/cudnn/backend.h"

#include <algorithm>
#include <mutex>

#include "core/workspace.h"
#include "cuda/common/checks.h"
#include "cuda/common/general.h"
#include "cuda/common/launch.h"
#include "cuda/cudnn/lengths.h"
#include "cuda/cudnn/library.h"
#include "cuda/cudnn/rules.h"

namespace tessera::cuda::cudnn {
namespace {

constexpr int64_t kAlignment = 256;  // of cuDNN's workspace

// True if cuDNN computes the call right: it reads and writes 16 bytes at a time without a look at
// addresses, and folds the scale into exponents, as is_steep() says.
bool takes_call(const Problem& problem, const Buffers& buffers) {
  constexpr uintptr_t kUnit = 16;
  for (const int index : {TESSERA_Q, TESSERA_K, TESSERA_V, TESSERA_O, TESSERA_DO, TESSERA_DQ,
                          TESSERA_DK, TESSERA_DV}) {
    const bool read = given(problem, index);
    if (read && reinterpret_cast<uintptr_t>(buffers.data[index]) % kUnit != 0) return false;
  }
  return !is_steep(softmax_scale_of(problem, buffers));
}

// The natural logarithm of a row's sum below which cuDNN's dq is wrong or NaN (9.19 on sm90).
constexpr float kLowLse = -80;

class CudnnPlan final : public Plan {
 public:
  // fallback: runs the calls that takes_call() refuses. repair: makes dq of a backward pass again in
  // tiles with a row below kLowLse.
  CudnnPlan(const Shape& shape, std::unique_ptr<Graph> graph, Handle& handle,
            std::unique_ptr<Plan> fallback, std::unique_ptr<Plan> repair)
      : shape_(shape),
        graph_(std::move(graph)),
        handle_(handle),
        fallback_(std::move(fallback)),
        repair_(std::move(repair)) {}

  int64_t workspace_bytes(const Problem& problem, int num_threads) const override {
    const Params params = params_of(problem, nominal_buffers(problem));
    Workspace workspace;
    (void)take(workspace, params, problem);
    return std::max(workspace.bytes(), fallback_->workspace_bytes(problem, num_threads));
  }

  Status run(const Problem& problem, const Buffers& buffers, const Device& device) const override {
    if (!takes_call(problem, buffers)) return fallback_->run(problem, buffers, device);
    const DeviceScope scope(device.ordinal);
    TESSERA_RETURN_IF_ERROR(scope.status());
    const auto stream = static_cast<cudaStream_t>(buffers.stream);
    TESSERA_RETURN_IF_ERROR(report_checks(problem, buffers, stream));
    const Params params = params_of(problem, buffers);
    Workspace workspace(buffers.workspace);
    Pieces pieces = take(workspace, params, problem);
    Pointers& p = pieces.pointers;
    p.q = buffers.data[TESSERA_Q];
    p.k = buffers.data[TESSERA_K];
    p.v = buffers.data[TESSERA_V];
    p.o = buffers.data[TESSERA_O];
    if (shape_.ragged) TESSERA_RETURN_IF_ERROR(queue_lengths(params, shape_, p, stream));
    if (shape_.backward) return run_backward(problem, buffers, device, params, pieces);
    if (!shape_.ragged) p.stats = buffers.data[TESSERA_LSE];
    TESSERA_RETURN_IF_ERROR(run_graph(pieces, params.softmax_scale, stream));
    if (!shape_.ragged) return {};
    return queue_rest(params, static_cast<const float*>(p.stats), stream);
  }

 private:
  struct Pieces {
    void* graph;
    void* repair;
    Pointers pointers;
  };

  Pieces take(Workspace& workspace, const Params& params, const Problem& problem) const {
    Pieces pieces{};
    pieces.graph = workspace.take<char>(graph_->workspace_bytes(), kAlignment);
    Pointers& p = pieces.pointers;
    if (shape_.backward) {
      pieces.repair = workspace.take<char>(repair_->workspace_bytes(problem, 0), kAlignment);
    }
    if (shape_.backward || (shape_.ragged && shape_.has_stats)) {
      p.stats = workspace.take<float>(Count{stats_rows(params)} * params.hq, kAlignment);
    }
    if (!shape_.ragged) return pieces;
    for (void** lengths : {&p.len_q, &p.len_k}) {
      *lengths = workspace.take<int32_t>(shape_.batch, kAlignment);
    }
    for (void** offsets : {&p.offset_q, &p.offset_k, &p.offset_v, &p.offset_o}) {
      *offsets = workspace.take<int64_t>(shape_.batch + 1, kAlignment);
    }
    if (shape_.has_stats) {
      p.offset_stats = workspace.take<int64_t>(shape_.batch + 1, kAlignment);
    }
    if (!shape_.backward) return pieces;
    for (void** offsets :
         {&p.offset_grad_o, &p.offset_grad_q, &p.offset_grad_k, &p.offset_grad_v}) {
      *offsets = workspace.take<int64_t>(shape_.batch + 1, kAlignment);
    }
    return pieces;
  }

  // Behind the lengths.
  Status run_backward(const Problem& problem, const Buffers& buffers, const Device& device,
                      const Params& params, Pieces& pieces) const {
    const auto stream = static_cast<cudaStream_t>(buffers.stream);
    Pointers& p = pieces.pointers;
    p.grad_o = buffers.data[TESSERA_DO];
    p.grad_q = buffers.data[TESSERA_DQ];
    p.grad_k = buffers.data[TESSERA_DK];
    p.grad_v = buffers.data[TESSERA_DV];
    TESSERA_RETURN_IF_ERROR(queue_stats(params, shape_, static_cast<float*>(p.stats), stream));
    TESSERA_RETURN_IF_ERROR(run_graph(pieces, params.softmax_scale, stream));
    Buffers of_repair = buffers;
    of_repair.workspace = pieces.repair;
    of_repair.workspace_bytes = repair_->workspace_bytes(problem, 0);
    TESSERA_RETURN_IF_ERROR(repair_->run(problem, of_repair, device));
    return shape_.ragged ? queue_rest_of_gradients(params, stream) : Status();
  }

  // A handle has one stream at a time.
  Status run_graph(const Pieces& pieces, float softmax_scale, cudaStream_t stream) const {
    const std::lock_guard lock(handle_.mutex);
    TESSERA_RETURN_IF_ERROR(set_stream(handle_, stream));
    return graph_->run(handle_.cudnn, pieces.pointers, softmax_scale, pieces.graph);
  }

  const Shape shape_;
  const std::unique_ptr<Graph> graph_;
  Handle& handle_;
  const std::unique_ptr<Plan> fallback_, repair_;
};

// What a pass may want beside its tensors, in fp32: splits of the keys; backward, sums of dq, and of
// dk and dv for each query head, with the strides of the gradients.
int64_t most_workspace(const Shape& s) {
  constexpr int64_t kSplits = 32, kFixed = int64_t{16} << 20, kSums = 8;
  if (!s.backward) {
    const Count rows = Count{s.batch} * s.hq * s.sq;
    return (rows * (s.dv + 4) * (kSplits * 4) + kFixed).value();
  }
  const auto tokens = [&](int64_t packed, int64_t padded) {
    constexpr int64_t kTile = 128;
    return packed > 0 ? Count{packed} : Count{s.batch} * ((padded + kTile - 1) / kTile * kTile);
  };
  const int64_t row = std::max(s.grad_q[2], s.hq * s.dqk),
                key = (s.hq / s.hk) *
                      (std::max(s.grad_k[2], s.hk * s.dqk) + std::max(s.grad_v[2], s.hk * s.dv));
  const Count sums = tokens(s.tokens_q, s.sq) * (row + 4 * s.hq) + tokens(s.tokens_k, s.sk) * key;
  return (sums * kSums + kFixed).value();
}

class CudnnBackend final : public CudnnRules {
 public:
  bool opens_library() const override { return true; }
  std::string unavailable() const override {
    return driver_unavailable().empty() ? library_unavailable() : driver_unavailable();
  }

  Result<std::unique_ptr<Plan>> plan(const Problem& canonical,
                                     const Device& device) const override {
    if (!unavailable().empty()) return Status(TESSERA_REFUSED, unavailable());
    const Result<DeviceInfo> info = device_info(device.ordinal);
    if (!info.ok()) return info.status();
    if (device.arch > 0 && device.arch != info.value().arch) {
      return Status(TESSERA_REFUSED, "arch=" + std::to_string(device.arch) +
                                         ": cuDNN plans for devices that are here");
    }
    const DeviceScope scope(device.ordinal);
    TESSERA_RETURN_IF_ERROR(scope.status());
    auto fallback = general_backend().plan(general_backend().canonical(canonical), device);
    if (!fallback.ok()) return fallback;
    std::unique_ptr<Plan> repair;
    if (is_backward(canonical)) {
      auto of_low_rows = plan_dq_of_low_rows(canonical, device, kLowLse);
      if (!of_low_rows.ok()) return of_low_rows;
      repair = std::move(of_low_rows).value();
    }
    const Result<Handle*> handle = handle_of(device.ordinal);
    if (!handle.ok()) return handle.status();
    const Shape shape = shape_of(canonical);
    const std::lock_guard lock(handle.value()->mutex);
    auto graph = build_graph(shape, info.value().arch, handle.value()->cudnn);
    if (!graph.ok()) return graph.status();
    if (graph.value()->workspace_bytes() > most_workspace(shape)) {
      return Status(TESSERA_REFUSED, "cuDNN's workspace of " +
                                         std::to_string(graph.value()->workspace_bytes()) +
                                         " bytes is not O(tokens)");
    }
    return std::unique_ptr<Plan>(
        std::make_unique<CudnnPlan>(shape, std::move(graph).value(), *handle.value(),
                                    std::move(fallback).value(), std::move(repair)));
  }

 protected:
  DeviceTraits traits_of(const Device& device) const override { return traits_of_device(device); }
};

}  // namespace

const Backend& backend() {
  static const CudnnBackend instance;
  return instance;
}

}  // namespace tessera::cuda::cudnn
