// SPDX-License-Identifier: Apache-2.0
#include "core/status.h"

#include <cstdarg>
#include <cstdio>

namespace tessera {
namespace {

std::string vformat(const char* format, va_list arguments) {
  va_list again;
  va_copy(again, arguments);
  const int length = std::vsnprintf(nullptr, 0, format, again);
  va_end(again);
  std::string text(length < 0 ? 0 : static_cast<size_t>(length), '\0');
  if (length > 0) std::vsnprintf(text.data(), text.size() + 1, format, arguments);
  return text;
}

}  // namespace

Status invalid(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  Status status(TESSERA_INVALID, vformat(format, arguments));
  va_end(arguments);
  return status;
}

Status failed(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  Status status(TESSERA_FAILED, vformat(format, arguments));
  va_end(arguments);
  return status;
}

std::string printable(std::string_view text) {
  constexpr char kHex[] = "0123456789abcdef";
  std::string line;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte != 0x7F) {
      line += c;
    } else if (c == '\n') {
      line += "\\n";
    } else {
      line += {'\\', 'x', kHex[byte >> 4], kHex[byte & 15]};
    }
  }
  return line;
}

}  // namespace tessera
