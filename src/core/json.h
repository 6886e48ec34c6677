// SPDX-License-Identifier: Apache-2.0
// A small JSON writer: appends to a string, keeps track of commas, escapes text.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace tessera {

class JsonWriter {
 public:
  JsonWriter& begin_object() { return open('{'); }
  JsonWriter& end_object() { return close('}'); }
  JsonWriter& begin_array() { return open('['); }
  JsonWriter& end_array() { return close(']'); }

  JsonWriter& key(std::string_view name) {
    comma();
    quote(name);
    text_ += ": ";
    after_key_ = true;
    return *this;
  }
  JsonWriter& string(std::string_view value) {
    comma();
    quote(value);
    return *this;
  }
  JsonWriter& number(int64_t value) { return raw(std::to_string(value)); }
  JsonWriter& boolean(bool value) { return raw(value ? "true" : "false"); }
  JsonWriter& null() { return raw("null"); }
  JsonWriter& raw(std::string_view json) {  // a value that is JSON already
    comma();
    text_ += json;
    return *this;
  }

  std::string take() && { return std::move(text_); }

 private:
  void comma() {
    if (!after_key_ && !text_.empty() && text_.back() != '{' && text_.back() != '[') text_ += ", ";
    after_key_ = false;
  }
  JsonWriter& open(char bracket) {
    comma();
    text_ += bracket;
    return *this;
  }
  JsonWriter& close(char bracket) {
    text_ += bracket;
    return *this;
  }
  void quote(std::string_view value) {
    constexpr char kHex[] = "0123456789abcdef";
    text_ += '"';
    for (const char c : value) {
      const auto byte = static_cast<unsigned char>(c);
      if (c == '"' || c == '\\') {
        text_ += '\\';
        text_ += c;
      } else if (c == '\n') {
        text_ += "\\n";
      } else if (byte < 0x20) {
        text_ += "\\u00";
        text_ += kHex[byte >> 4];
        text_ += kHex[byte & 15];
      } else {
        text_ += c;
      }
    }
    text_ += '"';
  }

  std::string text_;
  bool after_key_ = false;
};

}  // namespace tessera
