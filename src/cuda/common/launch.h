// SPDX-License-Identifier: Apache-2.0
// Host side of a launch, and CUDA's errors as Status.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <string>

#include "core/problem/problem.h"
#include "cuda/common/current_device.h"
#include "cuda/common/rules/arguments.h"
#include "cuda/common/rules/device.h"

namespace tessera::cuda {

// "cudaLaunchKernel (forward): invalid argument (cudaErrorInvalidValue)". An error that the context
// survives is cleared, so that the caller's next cudaGetLastError() is not ours.
Status cuda_status(cudaError_t error, const char* operation);

// Queues a kernel whose only argument is *args; answers this launch's own error, whatever error the
// caller has left behind. operation: "merge", for the message.
Status launch_kernel(const char* operation, const void* function, dim3 grid, int threads,
                     int shared_bytes, const void* args, cudaStream_t stream);
// The same for a kernel that may start while the one before it ends, and waits for its memory
// itself (griddepcontrol, from sm90 on), with CTAs that follow each other in clusters.
Status launch_overlapping(const char* operation, const void* function, dim3 grid, int threads,
                          int shared_bytes, const void* args, cudaStream_t stream,
                          int ctas_of_cluster = 1);

// Makes the device current for the calls of one scope and puts back the one that was.
class DeviceScope {
 public:
  explicit DeviceScope(int ordinal);
  const Status& status() const { return status_; }

 private:
  CurrentDevice current_;
  Status status_;
};

struct DeviceInfo {
  int arch;  // 90
  int multiprocessors;
  int shared_memory_per_cta;  // bytes, opt-in
  int shared_memory_per_sm;
};

// Asked of the driver once for each device; fails where there is none.
Result<DeviceInfo> device_info(int ordinal);

// How many multiprocessors a kernel fills whose CTAs take tile after tile: all but the caller's
// sm_margin. A kernel with a CTA for each tile leaves them free as its CTAs end.
inline int multiprocessors_for(const Buffers& buffers, int multiprocessors) {
  return std::max(multiprocessors - buffers.sm_margin, 1);
}

// "" when a CUDA device can be used; otherwise why not. Asked once.
const std::string& driver_unavailable();

// What the driver says of a device that is here and has device.arch, if that is given; otherwise
// imagined_traits().
DeviceTraits traits_of_device(const Device& device);

}  // namespace tessera::cuda
