// SPDX-License-Identifier: Apache-2.0
// The jobs on CUDA: one thread for each index, thread after thread where there are more.
#include <cuda_runtime_api.h>

#include <algorithm>

#include "cuda/common/current_device.h"
#include "nvte/device.h"
#include "nvte/tensor.h"
#include "nvte/tokens/jobs.h"

namespace tessera::nvte {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostBlocks = 4096;  // more than any device runs at once

template <typename Job>
__global__ void __launch_bounds__(kThreads) job_kernel(Job job) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads, count = job.count();
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count; i += step)
    job(i);
}

// An error that the context survives is cleared, so that the caller's next one is not ours.
void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();
  fail("%s: %s (%s)", what, cudaGetErrorString(error), cudaGetErrorName(error));
}

// Makes the device current for one scope.
class DeviceScope {
 public:
  explicit DeviceScope(int ordinal) : current_(ordinal) {
    check(current_.error(), "cuCtxPushCurrent");
  }

 private:
  cuda::CurrentDevice current_;
};

}  // namespace

tessera_device device_of(const void* memory) {
  int ordinal = 0;
  cudaError_t error = cudaSuccess;
  if (memory) {
    cudaPointerAttributes attributes{};
    error = cudaPointerGetAttributes(&attributes, memory);
    if (attributes.type != cudaMemoryTypeDevice && attributes.type != cudaMemoryTypeManaged) {
      error = cudaErrorInvalidValue;
    }
    ordinal = attributes.device;
  } else {
    error = cudaGetDevice(&ordinal);
  }
  if (error == cudaSuccess) return {TESSERA_CUDA, ordinal, 0, 0};
  (void)cudaGetLastError();
  return {TESSERA_CPU, 0, 0, 0};
}

void to_host(void* to, const void* from, int64_t bytes, const tessera_device& device,
             void* stream) {
  if (!is_cuda(device)) {
    std::memcpy(to, from, static_cast<size_t>(bytes));
    return;
  }
  const DeviceScope scope(device.ordinal);
  const auto queue = static_cast<cudaStream_t>(stream);
  check(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost, queue),
        "cudaMemcpyAsync");
  check(cudaStreamSynchronize(queue), "cudaStreamSynchronize");
}

template <typename Job>
void queue(const Job& job, const tessera_device& device, void* stream) {
  const int64_t blocks = std::min((job.count() + kThreads - 1) / kThreads, kMostBlocks);
  if (blocks <= 0) return;
  const DeviceScope scope(device.ordinal);
  void* arguments[] = {const_cast<Job*>(&job)};
  check(cudaLaunchKernel(reinterpret_cast<const void*>(&job_kernel<Job>),
                         dim3(static_cast<unsigned>(blocks)), dim3(kThreads), arguments, 0,
                         static_cast<cudaStream_t>(stream)),
        "cudaLaunchKernel (nvte)");
}

template void queue(const LengthsJob&, const tessera_device&, void*);
template void queue(const SlopesJob&, const tessera_device&, void*);
template void queue(const RngStateJob&, const tessera_device&, void*);
template void queue(const AppendJob&, const tessera_device&, void*);
template void queue(const ReindexJob&, const tessera_device&, void*);
template void queue(const ConvertJob&, const tessera_device&, void*);
template void queue(const MoveJob<HalfMap>&, const tessera_device&, void*);
template void queue(const MoveJob<ValidMap>&, const tessera_device&, void*);
template void queue(const MoveJob<RankMap>&, const tessera_device&, void*);
template void queue(const PlacesJob&, const tessera_device&, void*);
template void queue(const SecondHalfLseJob&, const tessera_device&, void*);
template void queue(const OutJob&, const tessera_device&, void*);
template void queue(const GradJob&, const tessera_device&, void*);
template void queue(const CopyJob&, const tessera_device&, void*);

}  // namespace tessera::nvte
