// SPDX-License-Identifier: Apache-2.0
// The tokens of a case: all that is known of one is in its row of tokens.cc.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "core/case/case.h"
#include "core/json.h"

namespace tessera {

struct Token {
  enum Takes : uint8_t { kNothing, kValue, kEither };
  enum Part : uint8_t { kWhat, kHow, kStored };  // of a line, in this order

  std::string_view key;
  std::string_view rule;     // what the value must be, in words
  std::string_view example;  // a token that would work
  Takes takes = kValue;
  bool (*read)(Case& c, std::string_view value);     // false: the value breaks the rule
  bool (*write)(const Case& c, std::string& value);  // false: the canonical line lacks it
  // Its flags and scalars, into a zeroed geometry; a null pointer: it has none.
  void (*put)(const Case& c, CaseGeometry& geometry) = nullptr;
  // As write, but of a problem. Only a token that is a flag or a scalar of the problem has it.
  bool (*show)(const Problem& p, std::string& value) = nullptr;
  // The keyword of attention that has the token's value, as it is written; "": there is none.
  std::string_view keyword = {};
  // Keywords that have another value than the token, or are there without it.
  void (*tell)(const Case& c, const Problem& p, JsonWriter& json) = nullptr;
  Part part = kWhat;
};

// In the order of docs/cases.md.
std::span<const Token> tokens();

}  // namespace tessera
