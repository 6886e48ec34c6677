// SPDX-License-Identifier: Apache-2.0
// What the imagined GPU was asked to launch, and whether a GPU would have done it.
#pragma once

#include <cstdint>
#include <string>

namespace imagined {

// Since the last reset(). fault: the first thing that CUDA would have refused; "": none.
struct Seen {
  int launches = 0, maps = 0;
  int64_t padded_bytes = 0;  // of copies of a bias
  std::string fault;
};
Seen& seen();
void reset();

// Ordinals of the two GPUs, and which of them is current.
constexpr int kA100 = 0, kH100 = 1;
void use(int ordinal);

}  // namespace imagined
