// SPDX-License-Identifier: Apache-2.0
// GuardedMemory: bytes that end at a page which no one may touch, so that reading or writing one
// byte too far is a fault at the guilty instruction.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>
#include <new>
#include <utility>

namespace tessera {

class GuardedMemory {
 public:
  GuardedMemory() = default;
  // `bytes` is rounded up to `alignment`, a power of two; throws std::bad_alloc. The pointer to 0
  // bytes is not null and may not be read.
  explicit GuardedMemory(size_t bytes, size_t alignment = 1) : bytes_(bytes) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t aligned = (bytes + alignment - 1) / alignment * alignment;
    const size_t usable = (aligned + page - 1) / page * page;
    mapped_ = usable + 2 * page;
    void* const map =
        mmap(nullptr, mapped_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED) throw std::bad_alloc();
    map_ = static_cast<std::byte*>(map);
    if (usable > 0 && mprotect(map_ + page, usable, PROT_READ | PROT_WRITE) != 0) {
      munmap(map_, mapped_);
      throw std::bad_alloc();
    }
    data_ = map_ + page + usable - aligned;
  }
  ~GuardedMemory() {
    if (map_) munmap(map_, mapped_);
  }
  GuardedMemory(GuardedMemory&& other) noexcept { *this = std::move(other); }
  GuardedMemory& operator=(GuardedMemory&& other) noexcept {
    std::swap(map_, other.map_);
    std::swap(data_, other.data_);
    std::swap(mapped_, other.mapped_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }

  std::byte* data() const { return data_; }
  size_t size() const { return bytes_; }
  void fill(int byte) {
    if (bytes_ > 0) std::memset(data_, byte, bytes_);
  }

 private:
  std::byte* map_ = nullptr;
  std::byte* data_ = nullptr;
  size_t mapped_ = 0, bytes_ = 0;
};

}  // namespace tessera
