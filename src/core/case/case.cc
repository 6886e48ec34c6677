// SPDX-License-Identifier: Apache-2.0
#include "core/case/case.h"

#include <algorithm>
#include <set>
#include <span>

#include "core/case/tokens.h"
#include "core/case/words.h"

namespace tessera {

using View = std::string_view;

namespace {

using words::split;

// Letters to add, drop, replace or swap with the next, to make one word of another.
size_t edits(View from, View to) {
  std::vector<std::vector<size_t>> d(from.size() + 1, std::vector<size_t>(to.size() + 1));
  for (size_t i = 0; i <= from.size(); ++i) {
    for (size_t j = 0; j <= to.size(); ++j) {
      if (i == 0 || j == 0) {
        d[i][j] = i + j;
        continue;
      }
      const bool same = from[i - 1] == to[j - 1];
      d[i][j] = std::min({d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + (same ? 0 : 1)});
      if (i > 1 && j > 1 && from[i - 1] == to[j - 2] && from[i - 2] == to[j - 1]) {
        d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
      }
    }
  }
  return d[from.size()][to.size()];
}

// The key that a word was meant to be; "" where none is near.
View nearest(View word, std::span<const Token> all) {
  View found;
  if (word.size() > 32) return found;
  size_t least = word.size() / 3 + 1;
  for (const Token& token : all) {
    const size_t distance = edits(word, token.key);
    if (distance < least) least = distance, found = token.key;
  }
  return found;
}

}  // namespace

Result<Case> parse_case(View text) {
  text = text.substr(0, text.find('#'));
  std::vector<View> words;
  for (View word : split(text, ' ')) {
    for (View part : split(word, '\t')) {
      while (!part.empty() && (part.back() == '\r' || part.back() == '\n')) part.remove_suffix(1);
      if (!part.empty()) words.push_back(part);
    }
  }
  const auto all = tokens();
  Case c;
  const auto quoted = [](View word) {
    return "case token '" + printable(word.substr(0, 80)) + "'";
  };
  if (words.size() < 2) {
    return invalid(
        "case '%s': must begin with a pass and a dtype; for example 'fwd bf16 b=2 s=64 h=4 "
        "d=64'",
        printable(text.substr(0, 80)).c_str());
  }
  if (words[0] != "fwd" && words[0] != "bwd") {
    return invalid("%s: a case begins with its pass; fwd or bwd", quoted(words[0]).c_str());
  }
  c.pass = words[0] == "fwd" ? TESSERA_FORWARD : TESSERA_BACKWARD;
  c.dtype = parse_dtype(words[1]);
  if (!is_float(c.dtype)) {
    return invalid("%s: the second word is the dtype; fp32, bf16, fp16, fp64, e4m3 or e5m2",
                   quoted(words[1]).c_str());
  }
  std::set<View> seen;
  const auto once = [&](View key) { return seen.insert(key).second; };
  for (size_t w = 2; w < words.size(); ++w) {
    const View word = words[w], key = word.substr(0, word.find('='));
    const bool has_value = key.size() < word.size();
    const auto token =
        std::find_if(all.begin(), all.end(), [&](const Token& t) { return t.key == key; });
    if (token == all.end()) {
      std::string known;
      for (const Token& t : all) known += (known.empty() ? "" : " ") + std::string(t.key);
      const View near = nearest(key, all);
      return invalid("%s: no such key; %s%s%sone of %s", quoted(word).c_str(),
                     near.empty() ? "" : "did you mean ", std::string(near).c_str(),
                     near.empty() ? "" : "? ", known.c_str());
    }
    // s, h, d and lens give two fields at once, keep and drop are one mask.
    bool fresh = once(key);
    if (key == "s") fresh = fresh && once("sq") && once("sk");
    if (key == "h") fresh = fresh && once("hq") && once("hk");
    if (key == "d") fresh = fresh && once("dqk") && once("dv");
    if (key == "lens") fresh = fresh && once("lens_q") && once("lens_k");
    if (key == "keep" || key == "drop") fresh = fresh && once("mask");
    if (!fresh)
      return invalid("%s: a key may be given once; remove one of them", quoted(word).c_str());
    const bool value_fits =
        token->takes == Token::kEither || has_value == (token->takes == Token::kValue);
    const View value = has_value ? word.substr(key.size() + 1) : View{};
    if (!value_fits || !token->read(c, value)) {
      return invalid("%s: must be %s; for example %s", quoted(word).c_str(),
                     std::string(token->rule).c_str(), std::string(token->example).c_str());
    }
  }
  if (Status status = check_case(c); !status.ok()) return status;
  return c;
}

std::string to_text(const Case& c) {
  std::string parts[Token::kStored + 1];
  for (const Token& token : tokens()) {
    std::string value;
    if (!token.write(c, value)) continue;
    parts[token.part] += " " + std::string(token.key) + (value.empty() ? "" : "=" + value);
  }
  return (c.pass == TESSERA_BACKWARD ? "bwd " : "fwd ") + std::string(dtype_name(c.dtype)) +
         parts[Token::kWhat] + parts[Token::kHow] + parts[Token::kStored];
}

namespace {

// A value as the keyword's: nothing is True, one number or two are numbers, the rest are words.
void tell_value(const std::string& value, JsonWriter& json) {
  const auto is_number = [](View text) {
    return !text.empty() && (text[0] == '-' || (text[0] >= '0' && text[0] <= '9'));
  };
  if (value.empty()) {
    json.boolean(true);
  } else if (!is_number(value)) {
    json.string(value);
  } else if (const auto numbers = split(value, ','); numbers.size() == 1) {
    json.raw(value);
  } else {
    json.begin_array();
    for (View number : numbers) json.raw(number);
    json.end_array();
  }
}

}  // namespace

void tell_keywords(const Case& c, const Problem& p, JsonWriter& json) {
  // Tokens whose keywords come first, in this order, whatever that of tokens is.
  constexpr View kFirst =
      "layout scale causal window align shift sq sk bias softcap sink dropout no_lse max_logit "
      "amax "
      "deterministic batch_invariant partial accumulate precision smooth";
  const auto tell = [&](const Token& token) {
    if (token.tell != nullptr) token.tell(c, p, json);
    std::string value;
    if (token.keyword.empty() || !token.write(c, value)) return;
    tell_value(value, json.key(token.keyword));
  };
  const auto first = split(kFirst, ' ');
  for (View key : first) {
    const auto token = std::ranges::find(tokens(), key, &Token::key);
    if (token != tokens().end()) tell(*token);
  }
  for (const Token& token : tokens()) {
    if (std::ranges::find(first, token.key) == first.end()) tell(token);
  }
}

}  // namespace tessera
