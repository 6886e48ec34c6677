// SPDX-License-Identifier: Apache-2.0
// A call's workspace, cut into pieces. One function takes the pieces of a call, for run() and for
// workspace_bytes(): without a base pieces are null, and only their bytes count. Inlined as Count is:
// the CPU's kernels cut their scratch so.
#pragma once

#include <cstdint>

#include "core/count.h"

namespace tessera {

class Workspace {
 public:
  [[gnu::always_inline]] explicit Workspace(void* base = nullptr)
      : base_(static_cast<char*>(base)) {}

  // `count` elements behind the piece before, from the next multiple of `alignment` bytes on; also
  // if there are none. The base is aligned enough.
  template <typename T>
  [[gnu::always_inline]] inline T* take(Count count, int64_t alignment = alignof(T)) {
    const Count begin = bytes_.up_to(alignment);
    bytes_ = begin + count * int64_t{sizeof(T)};
    return base_ ? reinterpret_cast<T*>(base_ + begin.value()) : nullptr;
  }

  // Up to the end of the last piece; Count::kTooMany where 63 bits do not hold them.
  [[gnu::always_inline]] int64_t bytes() const { return bytes_.value(); }

 private:
  char* base_;
  Count bytes_ = 0;
};

}  // namespace tessera
