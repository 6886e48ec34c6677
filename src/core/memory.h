// SPDX-License-Identifier: Apache-2.0
// DeviceMemory: how tests put a case's tensors on a device. A backend folder that has a device
// defines cuda_memory(); without one the symbol is null. Nothing in the library's own paths uses
// this.
#pragma once

#include "core/status.h"

namespace tessera {

struct DeviceMemory {
  // 256-byte aligned. `out` is null for no bytes.
  Status (*allocate)(int32_t ordinal, size_t bytes, void** out);
  void (*free)(int32_t ordinal, void* data);
  // Both return when the bytes are there.
  Status (*to_device)(int32_t ordinal, void* to, const void* from, size_t bytes);
  Status (*to_host)(int32_t ordinal, void* to, const void* from, size_t bytes);
  // Waits for all work of the device and reports its faults.
  Status (*synchronise)(int32_t ordinal);
};

// Null in a build without CUDA.
[[gnu::weak]] const DeviceMemory* cuda_memory();

}  // namespace tessera
