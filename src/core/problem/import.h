// SPDX-License-Identifier: Apache-2.0
// How a struct of another version of the header comes in.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "core/status.h"

namespace tessera {

// No caller's struct is larger; a size beyond it is an uninitialised field.
inline constexpr uint32_t kLargestStruct = 1 << 16;

// The caller's struct if the sizes agree, else its bytes over a zeroed `storage`. smallest: the
// size below which it cannot be one; name: of the struct, without tessera_.
template <typename Struct>
Result<const Struct*> import_struct(const Struct* caller, Struct& storage, size_t smallest,
                                    const char* name) {
  const uint32_t size = caller->struct_size;
  if (size == sizeof storage) return caller;
  if (size < smallest || size > kLargestStruct) {
    return invalid(
        "%s.struct_size=%u: must be the size of the caller's tessera_%s; this library's "
        "is %zu, set it to sizeof(tessera_%s)",
        name, size, name, sizeof storage, name);
  }
  const auto* bytes = reinterpret_cast<const unsigned char*>(caller);
  for (size_t i = sizeof storage; i < size; ++i) {
    if (bytes[i] != 0) {
      return invalid(
          "%s.struct_size=%u: byte %zu is not zero and this library knows %zu bytes "
          "only; update the library, or leave the newer fields zero",
          name, size, i, sizeof storage);
    }
  }
  std::memset(&storage, 0, sizeof storage);
  std::memcpy(&storage, caller, std::min<size_t>(size, sizeof storage));
  storage.struct_size = sizeof storage;
  return &storage;
}

}  // namespace tessera
