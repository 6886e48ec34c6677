// SPDX-License-Identifier: Apache-2.0
// The rows of core/problem/fields.def. Sees tessera.h alone, so that bindings may include it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <type_traits>

#include "tessera.h"

namespace tessera {

// A flag of the problem, or a member of the problem or of the buffers.
struct Field {
  enum Kind : uint8_t { kFlag, kWord, kInteger, kNumber, kText };
  Kind kind;
  std::string_view name;
  uint32_t flag;           // that is set where the scalar is given; 0: there is none
  bool of_buffers;         // which struct has the member
  size_t offset, size;     // of the member, bytes
  std::string_view words;  // of a kWord, by their numbers, with spaces between
};

#define TESSERA_MEMBER(kind, struct, member, flag, words)  \
  Field{Field::kind,                                       \
        #member,                                           \
        flag,                                              \
        std::is_same_v<tessera_##struct, tessera_buffers>, \
        offsetof(tessera_##struct, member),                \
        sizeof(tessera_##struct ::member),                 \
        words},
#define TESSERA_FLAG(FLAG, name) Field{Field::kFlag, #name, FLAG, false, 0, 0, {}},
#define TESSERA_TOKEN(FLAG, name, token) TESSERA_FLAG(FLAG, name)
#define TESSERA_WORD(struct, member, words) TESSERA_MEMBER(kWord, struct, member, 0, words)
#define TESSERA_INTEGER(struct, member, FLAG) TESSERA_MEMBER(kInteger, struct, member, FLAG, {})
#define TESSERA_NUMBER(struct, member, FLAG) TESSERA_MEMBER(kNumber, struct, member, FLAG, {})
#define TESSERA_TEXT(struct, member) TESSERA_MEMBER(kText, struct, member, 0, {})
inline constexpr Field kFields[] = {
#include "core/problem/fields.def"
};
#undef TESSERA_MEMBER
#undef TESSERA_FLAG
#undef TESSERA_TOKEN
#undef TESSERA_WORD
#undef TESSERA_INTEGER
#undef TESSERA_NUMBER
#undef TESSERA_TEXT

constexpr uint32_t known_flags() {
  uint32_t flags = 0;
  for (const Field& field : kFields) flags |= field.flag;
  return flags;
}

// Tokens of flags that say how, not what: a case line has them after its outputs.
inline constexpr uint32_t kModes = TESSERA_DETERMINISTIC | TESSERA_BATCH_INVARIANT;

}  // namespace tessera
