// SPDX-License-Identifier: Apache-2.0
// libcudnn, which is never linked: found and opened on first need, and kept for as long as the
// process lives. library.cc also defines, hidden, the functions of it that its front end calls.
#pragma once

#include <cuda_runtime_api.h>

#include <mutex>
#include <string>

#include "core/status.h"

namespace tessera::cuda::cudnn {

// "" where libcudnn is open and new enough; otherwise why not. The first call opens it.
const std::string& library_unavailable();

// A cudnnHandle_t of a device, which one thread at a time may use. It is never destroyed: plans may
// outlive whatever would do so.
struct Handle {
  std::mutex mutex;
  void* cudnn = nullptr;
};

// The handle of the device `ordinal`, which is current. The first call for a device makes it, which
// allocates. Only where library_unavailable() is "".
Result<Handle*> handle_of(int ordinal);

// The stream of what is run next. handle.mutex is held.
Status set_stream(const Handle& handle, cudaStream_t stream);

}  // namespace tessera::cuda::cudnn
