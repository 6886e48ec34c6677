// SPDX-License-Identifier: Apache-2.0
#include "cuda/common/checks.h"

#include <vector>

#include "core/log.h"
#include "core/overlap.h"
#include "cuda/common/launch.h"

namespace tessera::cuda {
namespace {

// What the host validates by value where it can read it.
constexpr int kChecked[] = {
    TESSERA_SEQLENS_Q,    TESSERA_SEQLENS_K,           TESSERA_CU_SEQLENS_Q,
    TESSERA_CU_SEQLENS_K, TESSERA_CU_SEQLENS_Q_PADDED, TESSERA_CU_SEQLENS_K_PADDED,
    TESSERA_PAGE_TABLE_K, TESSERA_PAGE_TABLE_V,        TESSERA_SINK,
    TESSERA_ALIBI_SLOPES,
};

}  // namespace

Status report_checks(const Problem& problem, const Buffers& buffers, cudaStream_t stream) {
  if (!log_enabled(Topic::kChecks)) return {};
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  TESSERA_RETURN_IF_ERROR(
      cuda_status(cudaStreamIsCapturing(stream, &capture), "cudaStreamIsCapturing"));
  if (capture != cudaStreamCaptureStatusNone) {
    log(Topic::kChecks, "not checked: the stream is being captured");
    return {};
  }
  Buffers on_host = buffers;
  std::vector<std::vector<char>> copies;
  for (const int index : kChecked) {
    if (!given(problem, index)) continue;
    const uint64_t bytes = reach_in_bytes(problem.tensor[index], tensor_rule(index).rank);
    if (bytes == 0) continue;
    std::vector<char>& copy = copies.emplace_back(bytes);
    TESSERA_RETURN_IF_ERROR(cuda_status(
        cudaMemcpyAsync(copy.data(), buffers.data[index], bytes, cudaMemcpyDeviceToHost, stream),
        "cudaMemcpyAsync"));
    // One array for both sides stays one.
    for (const int other : kChecked) {
      if (buffers.data[other] == buffers.data[index]) on_host.data[other] = copy.data();
    }
  }
  if (copies.empty()) return {};
  TESSERA_RETURN_IF_ERROR(cuda_status(cudaStreamSynchronize(stream), "cudaStreamSynchronize"));
  const Status status = validate(problem, on_host, Device{TESSERA_CPU, 0, 0, 0});
  if (!status.ok()) {
    log(Topic::kChecks, "%s (on the device: the call goes on with the value clamped)",
        status.message().c_str());
  }
  return {};
}

}  // namespace tessera::cuda
