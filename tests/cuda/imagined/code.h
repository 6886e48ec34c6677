// SPDX-License-Identifier: Apache-2.0
// What stands in the tables for the code of kernels that nobody compiled.
#pragma once

namespace tessera::cuda {

template <typename Code>
inline constexpr Code kImaginedCode{};

struct ImaginedCode {
  template <typename Code>
  constexpr operator const Code*() const {
    return &kImaginedCode<Code>;
  }
};

}  // namespace tessera::cuda
