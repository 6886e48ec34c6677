// SPDX-License-Identifier: Apache-2.0
#include "nvte/tokens/arguments.h"

#include <cinttypes>

namespace tessera::nvte {

const Tensor& with_data(NVTETensor handle, const char* name, int64_t axes) {
  const Tensor& tensor = tensor_of(handle, name);
  if (tensor.ndim() == axes && (tensor.data() || tensor.numel() == 0)) return tensor;
  fail("%s.shape=%s, data=%p: must have %" PRId64 " axes, and memory", name,
       shape_text(tensor).c_str(), tensor.data(), axes);
}

Integers integers(NVTETensor handle, const char* name, int64_t numel) {
  const Tensor& tensor = tensor_of(handle, name);
  const bool wide = tensor.dtype() == kNVTEInt64;
  if ((wide || tensor.dtype() == kNVTEInt32) && tensor.numel() >= numel &&
      (tensor.data() || numel == 0)) {
    return {tensor.data(), wide};
  }
  fail("%s.shape=%s, dtype=%d, data=%p: must be kNVTEInt32 or kNVTEInt64, at least %" PRId64
       " numbers",
       name, shape_text(tensor).c_str(), static_cast<int>(tensor.dtype()), tensor.data(), numel);
}

Rows pieces_of(int64_t bytes, const void* a, const void* b) {
  const auto bits = reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b) |
                    static_cast<uintptr_t>(bytes);
  return {bytes, bits % 16 == 0 ? 16 : bits % 4 == 0 ? 4 : bits % 2 == 0 ? 2 : 1};
}

}  // namespace tessera::nvte
