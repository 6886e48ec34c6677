// SPDX-License-Identifier: Apache-2.0
// Where a call runs, and jobs there. device.cu has the CUDA half, which builds without CUDA lack.
#pragma once

#include <cstring>

#include "nvte/jobs.h"
#include "tessera.h"

namespace tessera::nvte {

// The CUDA device that owns `memory`, else the CPU. Null memory, which a query has, is on the
// current CUDA device, or the CPU where there is none.
tessera_device device_of(const void* memory);

// Waits for the stream and copies memory of the device to the host.
void to_host(void* to, const void* from, int64_t bytes, const tessera_device& device, void* stream);

// Queues the job on CUDA; what that refuses is thrown as Wrong. device.cu has one for every job.
template <typename Job>
void queue(const Job& job, const tessera_device& device, void* stream);

#if !TESSERA_WITH_CUDA
inline tessera_device device_of(const void*) { return {TESSERA_CPU, 0, 0, 0}; }
inline void to_host(void* to, const void* from, int64_t bytes, const tessera_device&, void*) {
  if (bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
}
#endif

inline bool is_cuda(const tessera_device& device) { return device.kind == TESSERA_CUDA; }

// On the CPU before it returns, or queued on a stream of the device.
template <typename Job>
void run(const Job& job, const tessera_device& device, void* stream) {
  if constexpr (TESSERA_WITH_CUDA) {
    if (is_cuda(device)) return queue(job, device, stream);
  }
  (void)device, (void)stream;
  const int64_t count = job.count();
  for (int64_t i = 0; i < count; ++i) job(i);
}

}  // namespace tessera::nvte
