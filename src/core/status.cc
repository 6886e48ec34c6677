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

}  // namespace tessera
