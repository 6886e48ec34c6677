// SPDX-License-Identifier: Apache-2.0
// Device memory for the conformance suite. Blocking on purpose; no path of the library comes here.
#include "core/memory.h"

#include "cuda/common/launch.h"

namespace tessera {
namespace cuda {
namespace {

Status allocate(int32_t ordinal, size_t bytes, void** out) {
  *out = nullptr;
  const DeviceScope scope(ordinal);
  TESSERA_RETURN_IF_ERROR(scope.status());
  return bytes == 0 ? Status() : cuda_status(cudaMalloc(out, bytes), "cudaMalloc");
}

void release(int32_t ordinal, void* data) {
  const DeviceScope scope(ordinal);
  (void)cudaFree(data);
}

Status copy(int32_t ordinal, void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  const DeviceScope scope(ordinal);
  TESSERA_RETURN_IF_ERROR(scope.status());
  return bytes == 0 ? Status() : cuda_status(cudaMemcpy(to, from, bytes, kind), "cudaMemcpy");
}

Status to_device(int32_t ordinal, void* to, const void* from, size_t bytes) {
  return copy(ordinal, to, from, bytes, cudaMemcpyHostToDevice);
}

Status to_host(int32_t ordinal, void* to, const void* from, size_t bytes) {
  return copy(ordinal, to, from, bytes, cudaMemcpyDeviceToHost);
}

Status synchronise(int32_t ordinal) {
  const DeviceScope scope(ordinal);
  TESSERA_RETURN_IF_ERROR(scope.status());
  return cuda_status(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

}  // namespace
}  // namespace cuda

const DeviceMemory* cuda_memory() {
  static const DeviceMemory memory{cuda::allocate, cuda::release, cuda::to_device, cuda::to_host,
                                   cuda::synchronise};
  return &memory;
}

}  // namespace tessera
