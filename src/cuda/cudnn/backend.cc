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
  for (const int index : {TESSERA_Q, TESSERA_K, TESSERA_V, TESSERA_O}) {
    if (reinterpret_cast<uintptr_t>(buffers.data[index]) % kUnit != 0) return false;
  }
  return !is_steep(softmax_scale_of(problem, buffers));
}

class CudnnPlan final : public Plan {
 public:
  // fallback: runs the calls that takes_call() refuses.
  CudnnPlan(const Shape& shape, std::unique_ptr<Graph> graph, Handle& handle,
            std::unique_ptr<Plan> fallback)
      : shape_(shape), graph_(std::move(graph)), handle_(handle), fallback_(std::move(fallback)) {}

  int64_t workspace_bytes(const Problem& problem, int num_threads) const override {
    const Params params = params_of(problem, nominal_buffers(problem));
    Workspace workspace;
    (void)take(workspace, params);
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
    Pieces pieces = take(workspace, params);
    pieces.pointers.q = buffers.data[TESSERA_Q];
    pieces.pointers.k = buffers.data[TESSERA_K];
    pieces.pointers.v = buffers.data[TESSERA_V];
    pieces.pointers.o = buffers.data[TESSERA_O];
    if (!shape_.ragged) pieces.pointers.stats = buffers.data[TESSERA_LSE];
    if (shape_.ragged) {
      TESSERA_RETURN_IF_ERROR(queue_lengths(params, shape_, pieces.pointers, stream));
    }
    TESSERA_RETURN_IF_ERROR(run_graph(pieces, params.softmax_scale, stream));
    if (!shape_.ragged) return {};
    return queue_rest(params, static_cast<const float*>(pieces.pointers.stats), stream);
  }

 private:
  struct Pieces {
    void* graph;
    Pointers pointers;
  };

  Pieces take(Workspace& workspace, const Params& params) const {
    Pieces pieces{};
    pieces.graph = workspace.take<char>(graph_->workspace_bytes(), kAlignment);
    if (!shape_.ragged) return pieces;
    Pointers& p = pieces.pointers;
    for (void** lengths : {&p.len_q, &p.len_k}) {
      *lengths = workspace.take<int32_t>(shape_.batch, kAlignment);
    }
    for (void** offsets : {&p.offset_q, &p.offset_k, &p.offset_v, &p.offset_o}) {
      *offsets = workspace.take<int64_t>(shape_.batch + 1, kAlignment);
    }
    if (!shape_.writes_stats) return pieces;
    p.offset_stats = workspace.take<int64_t>(shape_.batch + 1, kAlignment);
    p.stats = workspace.take<float>(Count{stats_rows(params)} * params.hq, kAlignment);
    return pieces;
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
  const std::unique_ptr<Plan> fallback_;
};

// What a forward pass may want beside its tensors: splits of the keys, in fp32.
int64_t most_workspace(const Shape& s) {
  constexpr int64_t kSplits = 32, kFixed = int64_t{16} << 20;
  const Count rows = Count{s.batch} * s.hq * s.sq;
  return (rows * (s.dv + 4) * (kSplits * 4) + kFixed).value();
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
    return std::unique_ptr<Plan>(std::make_unique<CudnnPlan>(
        shape, std::move(graph).value(), *handle.value(), std::move(fallback).value()));
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
