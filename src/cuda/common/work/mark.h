// SPDX-License-Identifier: Apache-2.0
// What a launch leaves in the workspace, whose content is unknown, bears its mark: what bears none
// says nothing, so that nobody clears the workspace.
#pragma once

#include <atomic>
#include <cstdint>

namespace tessera::cuda {

// Another one for each launch; never 0, and a value that stray memory is unlikely to hold. A graph
// launches again with the same.
inline uint64_t next_mark() {
  constexpr uint64_t kFirst = 0x9e3779b97f4a7c15;
  static std::atomic<uint64_t> launches{0};
  return kFirst + launches.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace tessera::cuda
