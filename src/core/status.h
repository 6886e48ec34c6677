// SPDX-License-Identifier: Apache-2.0
// Status and Result: how every function of the library says that it failed.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "tessera.h"

namespace tessera {

// A success costs one int; a failure carries the whole message that the user will read.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(tessera_code code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == TESSERA_OK; }
  tessera_code code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  tessera_code code_ = TESSERA_OK;
  std::string message_;
};

// printf-style constructors; a message names the operation at the front door only (c_api.cc), so
// text here begins with the field: "k.shape=[2, 5, 3, 64]: must ...; ...".
[[gnu::format(printf, 1, 2)]] Status invalid(const char* format, ...);
[[gnu::format(printf, 1, 2)]] Status failed(const char* format, ...);

// A caller's text as one line of a message quotes it: control characters as \n or \x1b.
std::string printable(std::string_view text);

template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}
  Result(Status status) : status_(std::move(status)) {}

  bool ok() const { return status_.ok(); }
  const Status& status() const { return status_; }
  T& value() & { return *value_; }
  const T& value() const& { return *value_; }
  T&& value() && { return std::move(*value_); }

 private:
  std::optional<T> value_;
  Status status_;
};

#define TESSERA_RETURN_IF_ERROR(expression)                                      \
  do {                                                                           \
    if (::tessera::Status status_ = (expression); !status_.ok()) return status_; \
  } while (0)

}  // namespace tessera
