// SPDX-License-Identifier: Apache-2.0
// A call's workspace, cut into pieces. One function takes the pieces of a call, for run() and for
// workspace_bytes(): without a base pieces are null, and only their bytes count.
#pragma once

#include <cstdint>

namespace tessera {

class Workspace {
 public:
  explicit Workspace(void* base = nullptr) : base_(static_cast<char*>(base)) {}

  // `count` elements behind the piece before, from the next multiple of `alignment` bytes on; also
  // if there are none. The base is aligned enough.
  template <typename T>
  T* take(int64_t count, int64_t alignment = alignof(T)) {
    const int64_t begin = (bytes_ + alignment - 1) / alignment * alignment;
    bytes_ = begin + count * static_cast<int64_t>(sizeof(T));
    return base_ ? reinterpret_cast<T*>(base_ + begin) : nullptr;
  }

  // Up to the end of the last piece.
  int64_t bytes() const { return bytes_; }

 private:
  char* base_;
  int64_t bytes_ = 0;
};

}  // namespace tessera
