// SPDX-License-Identifier: Apache-2.0
// Rows of tokens.cc that are like others. `member` is the Case's.
#pragma once

#include <cstddef>
#include <string>

#include "core/case/tokens.h"
#include "core/case/words.h"
#include "core/problem/fields.h"

namespace tessera::token_kinds {

using words::text_of, words::lengths, words::size, words::write;
using View = std::string_view;
using Text = std::string;
using Geometry = CaseGeometry;
using Json = JsonWriter;

// Stands for a member of the problem or the geometry where there is none.
inline constexpr std::nullptr_t kNone = nullptr;

inline bool count_text(int64_t value, Text& out) { return out = std::to_string(value), value > 0; }

template <auto member, uint32_t bits = 0>
constexpr Token flag(View key, View keyword = {}, Token::Part part = Token::kWhat) {
  return {.key = key,
          .rule = "without a value",
          .example = key,
          .takes = Token::kNothing,
          .read = [](Case& c, View) { return c.*member = true; },
          .write = [](const Case& c, Text&) { return c.*member; },
          .put = [](const Case& c, Geometry& g) { g.problem.flags |= c.*member ? bits : 0; },
          .keyword = keyword,
          .part = part};
}

// A bit of Case::flags, which is one of the problem.
template <uint32_t bit>
constexpr Token bit_of_flags(View key, View keyword) {
  return {.key = key,
          .rule = "without a value",
          .example = key,
          .takes = Token::kNothing,
          .read = [](Case& c, View) { return (c.flags |= bit) != 0; },
          .write = [](const Case& c, Text&) { return c.has(bit); },
          .put = [](const Case& c, Geometry& g) { g.problem.flags |= c.flags & bit; },
          .show = [](const Problem& p, Text&) { return has(p, bit); },
          .keyword = keyword,
          .part = (bit & kModes) != 0 ? Token::kHow : Token::kWhat};
}

// A whole number of at least 1; 0 = none. `scalar`: the member of the problem that is the same, and
// then a keyword of its own.
template <auto member, auto scalar = kNone>
constexpr Token count(View key, View rule, View example) {
  Token token{.key = key,
              .rule = rule,
              .example = example,
              .read = [](Case& c, View v) { return size(v, 1, c.*member); },
              .write = [](const Case& c, Text& v) { return count_text(c.*member, v); }};
  if constexpr (scalar != kNone) {
    token.put = [](const Case& c, Geometry& g) { g.problem.*scalar = c.*member; };
    token.show = [](const Problem& p, Text& v) { return count_text(p.*scalar, v); };
    token.keyword = key;
  }
  return token;
}

// A number that fits; 0 = off. bits and `scalar`: the problem's flag for it, and the geometry's member.
template <auto member, auto fits, uint32_t bits = 0, auto scalar = kNone>
constexpr Token number(View key, View rule, View example, View keyword = {}) {
  return {.key = key,
          .rule = rule,
          .example = example,
          .read = [](Case& c, View v) { return words::number(v, c.*member) && fits(c.*member); },
          .write = [](const Case& c, Text& v) { return v = text_of(c.*member), c.*member > 0; },
          .put =
              [](const Case& c, Geometry& g) {
                g.problem.flags |= c.*member > 0 ? bits : 0;
                if constexpr (scalar != kNone) g.*scalar = c.*member;
              },
          .keyword = keyword};
}
constexpr bool positive(double x) { return x > 0; }
constexpr bool share(double x) { return x > 0 && x <= 1; }
constexpr bool share_below_one(double x) { return x > 0 && x < 1; }

// Two integers of least..most. `given` is whether they are.
template <auto given, auto first, auto second, int64_t least, int64_t most>
constexpr Token pair(View key, View rule, View example) {
  return {.key = key,
          .rule = rule,
          .example = example,
          .read =
              [](Case& c, View v) {
                const auto parts = words::split(v, ',');
                c.*given = true;
                return parts.size() == 2 && words::integer(parts[0], least, most, c.*first) &&
                       words::integer(parts[1], least, most, c.*second);
              },
          .write =
              [](const Case& c, Text& v) {
                v = std::to_string(c.*first) + "," + std::to_string(c.*second);
                return c.*given;
              }};
}

template <auto member>
constexpr Token dtype(View key, View rule, View example) {
  return {.key = key,
          .rule = rule,
          .example = example,
          .read = [](Case& c, View v) { return is_float(c.*member = parse_dtype(v)); },
          .write =
              [](const Case& c, Text& v) {
                v = dtype_name(c.*member);
                return c.*member != TESSERA_NONE;
              }};
}

template <auto member, bool full>
constexpr Token list(View key, View rule, View example) {
  return {.key = key,
          .rule = rule,
          .example = example,
          .read = [](Case& c, View v) { return (full || v != "full") && lengths(v, c.*member); },
          .write = [](const Case& c, Text& v) { return write(c.*member, v); }};
}

// s=N for sq=N sk=N.
template <auto member, auto other, int64_t least>
constexpr Token both(View key, View rule, View example) {
  return {
      .key = key,
      .rule = rule,
      .example = example,
      .read = [](Case& c, View v) { return size(v, least, c.*member) && size(v, least, c.*other); },
      .write = [](const Case& c,
                  Text& v) { return v = std::to_string(c.*member), c.*member == c.*other; }};
}

// A size that is written where it differs from the other one.
template <auto member, auto other, int64_t least>
constexpr Token one(View key, View rule, View example) {
  return {.key = key,
          .rule = rule,
          .example = example,
          .read = [](Case& c, View v) { return size(v, least, c.*member); },
          .write = [](const Case& c,
                      Text& v) { return v = std::to_string(c.*member), c.*member != c.*other; }};
}

// A row with a way of its own to tell its keyword.
constexpr Token told(Token token, void (*tell)(const Case&, const Problem&, Json&)) {
  token.tell = tell;
  return token;
}

}  // namespace tessera::token_kinds
