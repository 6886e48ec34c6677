// SPDX-License-Identifier: Apache-2.0
#include "core/case/case.h"

#include <algorithm>
#include <set>
#include <span>

#include "core/case/words.h"

namespace tessera {

using View = std::string_view;

namespace {

using namespace words;  // NOLINT: the readers of values

// What a token's value must be, in words, and one that would work.
struct Token {
  View key;
  bool takes_value;
  View rule;
  View example;
  bool (*read)(Case& c, View value);  // false: the value breaks the rule
};
std::span<const Token> tokens();

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
    // alibi stands alone or with a value.
    const bool value_fits = has_value == token->takes_value || (key == "alibi" && !has_value);
    const View value = has_value ? word.substr(key.size() + 1) : View{};
    if (!value_fits || !token->read(c, value)) {
      return invalid("%s: must be %s; for example %s", quoted(word).c_str(),
                     std::string(token->rule).c_str(), std::string(token->example).c_str());
    }
  }
  if (Status status = check_case(c); !status.ok()) return status;
  return c;
}

namespace {

// ---- the keys ----

constexpr View kSize = "a size in 0..2^40", kPositive = "a size in 1..2^40";
constexpr View kList = "full, n,n,... or random:SEED";
constexpr View kMask =
    "random:P, keys:P or blocks:P, P in [0, 1], with /SHAPE of letters of bhqk in this "
    "order (keys without q)";
constexpr View kLow =
    "VALUE,WHERE: a finite number below 0 or min (of the dtype), and random:P, keys:P, rows:P, "
    "blocks:P with P in (0, 1], from:KEY or causal";
constexpr View kFlag = "without a value";
constexpr View kStarts = "n,n,... or random:SEED";
#define FLAG(name, field)                                                        \
  Token {                                                                        \
    name, false, kFlag, name, [](Case& c, View) { return c.field = true, true; } \
  }
constexpr Token kTokens[] = {
    {"b", true, kSize, "b=2", [](Case& c, View v) { return size(v, 0, c.b); }},
    {"s", true, kSize, "s=128",
     [](Case& c, View v) { return size(v, 0, c.sq) && size(v, 0, c.sk); }},
    {"sq", true, kSize, "sq=128", [](Case& c, View v) { return size(v, 0, c.sq); }},
    {"sk", true, kSize, "sk=128", [](Case& c, View v) { return size(v, 0, c.sk); }},
    {"h", true, kPositive, "h=4",
     [](Case& c, View v) { return size(v, 1, c.hq) && size(v, 1, c.hk); }},
    {"hq", true, kPositive, "hq=8", [](Case& c, View v) { return size(v, 1, c.hq); }},
    {"hk", true, kPositive, "hk=2", [](Case& c, View v) { return size(v, 1, c.hk); }},
    {"d", true, kPositive, "d=64",
     [](Case& c, View v) { return size(v, 1, c.dqk) && size(v, 1, c.dv); }},
    {"dqk", true, kPositive, "dqk=192", [](Case& c, View v) { return size(v, 1, c.dqk); }},
    {"dv", true, kPositive, "dv=128", [](Case& c, View v) { return size(v, 1, c.dv); }},
    {"kv", true, "a floating dtype", "kv=e4m3",
     [](Case& c, View v) { return is_float(c.kv_dtype = parse_dtype(v)); }},
    {"layout", true,
     "a format (bshd, sbhd, bhsd, thd), two of them (q and k/v) or a layout of "
     "TransformerEngine",
     "layout=sbhd or layout=bshd,sbhd or layout=bs3hd",
     [](Case& c, View v) { return read_layout(c.layout, v); }},
    {"lens", true, kList, "lens=5,17", [](Case& c, View v) { return lengths(v, c.lens); }},
    {"lens_q", true, kList, "lens_q=5,17", [](Case& c, View v) { return lengths(v, c.lens_q); }},
    {"lens_k", true, kList, "lens_k=random:3",
     [](Case& c, View v) { return lengths(v, c.lens_k); }},
    {"gaps", true, "a number of tokens or random:SEED", "gaps=3",
     [](Case& c, View v) {
       View rest;
       const bool random = after(v, "random:", rest);
       c.gaps.kind = random ? CaseGaps::Kind::kRandom : CaseGaps::Kind::kFixed;
       return integer(random ? rest : v, 0, 0xFFFFFFFFll, c.gaps.value);
     }},
    {"page", true, "a number of tokens of at least 1", "page=16",
     [](Case& c, View v) { return size(v, 1, c.page); }},
    {"tables", true, "1 or 2", "tables=2",
     [](Case& c, View v) { return integer(v, 1, 2, c.tables); }},
    FLAG("int64", int64_lengths),
    FLAG("causal", causal),
    {"window", true, "L,R, each -1 (unbounded) or more", "window=128,0",
     [](Case& c, View v) {
       const auto sides = split(v, ',');
       c.window = true;
       return sides.size() == 2 && integer(sides[0], -1, INT64_MAX, c.window_left) &&
              integer(sides[1], -1, INT64_MAX, c.window_right);
     }},
    {"align", true, "top_left or bottom_right", "align=bottom_right",
     [](Case& c, View v) {
       c.align = v == "top_left" ? TESSERA_ALIGN_TOP_LEFT : TESSERA_ALIGN_BOTTOM_RIGHT;
       return v == "top_left" || v == "bottom_right";
     }},
    {"shift", true, "an integer or random:SEED", "shift=-3",
     [](Case& c, View v) {
       View rest;
       const bool random = after(v, "random:", rest);
       c.shift.kind = random ? CaseShift::Kind::kRandom : CaseShift::Kind::kOne;
       return integer(random ? rest : v, random ? 0 : -kMaxSize, kMaxSize, c.shift.value);
     }},
    {"q_start", true, kStarts, "q_start=4,0",
     [](Case& c, View v) { return v != "full" && lengths(v, c.q_start); }},
    {"k_start", true, kStarts, "k_start=random:5",
     [](Case& c, View v) { return v != "full" && lengths(v, c.k_start); }},
    {"keep", true, kMask, "keep=random:0.7/bqk",
     [](Case& c, View v) { return mask(v, false, c.mask); }},
    {"drop", true, kMask, "drop=keys:0.7", [](Case& c, View v) { return mask(v, true, c.mask); }},
    {"ranges", true, "random:SEED, two:SEED or prefix:N", "ranges=prefix:16",
     [](Case& c, View v) {
       View rest;
       if (after(v, "random:", rest))
         c.ranges.kind = CaseRanges::Kind::kRandom;
       else if (after(v, "two:", rest))
         c.ranges.kind = CaseRanges::Kind::kTwo;
       else if (after(v, "prefix:", rest))
         c.ranges.kind = CaseRanges::Kind::kPrefix;
       else
         return false;
       return integer(rest, 0, 0x7FFFFFFF, c.ranges.value);
     }},
    {"segments", true, "N, again:N or random:N, N in 1..2^20", "segments=3",
     [](Case& c, View v) {
       View rest = v;
       if (after(v, "again:", rest))
         c.segments.kind = CaseSegments::Kind::kAgain;
       else if (after(v, "random:", rest))
         c.segments.kind = CaseSegments::Kind::kRandom;
       return integer(rest, 1, 1 << 20, c.segments.ids);
     }},
    {"scale", true, "a finite number of at least 0", "scale=0.125",
     [](Case& c, View v) { return c.has_scale = number(v, c.scale) && c.scale >= 0; }},
    {"softcap", true, "a finite number above 0", "softcap=30",
     [](Case& c, View v) { return number(v, c.softcap) && c.softcap > 0; }},
    {"bias", true, "post or pre, with /SHAPE of letters of bhqk in this order", "bias=post/hqk",
     [](Case& c, View v) {
       const View at = v.substr(0, v.find('/'));
       c.bias = at == "pre" ? Case::BiasAt::kPre : Case::BiasAt::kPost;
       c.bias_shape = "hqk";
       return (at == "pre" || at == "post") &&
              (at.size() == v.size() || shape_letters(v.substr(at.size() + 1), c.bias_shape));
     }},
    {"bias_inf", true, "a probability in (0, 1]", "bias_inf=0.3",
     [](Case& c, View v) { return number(v, c.bias_inf) && c.bias_inf > 0 && c.bias_inf <= 1; }},
    {"bias_low", true, kLow, "bias_low=min,keys:0.3",
     [](Case& c, View v) { return bias_low(v, c.bias_low); }},
    {"bias_dtype", true, "fp32, or left out for the dtype of q", "bias_dtype=fp32",
     [](Case& c, View v) { return v == "fp32" && (c.bias_dtype = TESSERA_FP32); }},
    {"alibi", true, "alone (a slope for each head) or bh (for each batch and head)", "alibi=bh",
     [](Case& c, View v) {
       c.alibi = v.empty() ? Case::Alibi::kPerHead : Case::Alibi::kPerBatchHead;
       return v.empty() || v == "bh";
     }},
    {"sink", true, "off_by_one, learnable or a finite number other than 0 (of every head)",
     "sink=learnable",
     [](Case& c, View v) {
       c.sink = v == "off_by_one" ? Case::Sink::kOffByOne : Case::Sink::kLearnable;
       const bool drawn = v == "off_by_one" || v == "learnable";
       return drawn || (number(v, c.sink_value) && c.sink_value != 0);
     }},
    {"dropout", true, "a probability in (0, 1)", "dropout=0.1",
     [](Case& c, View v) { return number(v, c.dropout) && c.dropout > 0 && c.dropout < 1; }},
    {"rng", true, "FIRST,STRIDE, each at least 0", "rng=4,16",
     [](Case& c, View v) {
       const auto words = split(v, ',');
       c.four_words = true;
       return words.size() == 2 && integer(words[0], 0, kMaxSize, c.rng_first) &&
              integer(words[1], 0, kMaxSize, c.rng_stride);
     }},
#define TESSERA_TOKEN(BIT, name, token) \
  Token{token, false, kFlag, token, [](Case& c, View) { return c.flags |= BIT, true; }},
#define TESSERA_FLAG(...)
#define TESSERA_WORD(...)
#define TESSERA_INTEGER(...)
#define TESSERA_NUMBER(...)
#define TESSERA_TEXT(...)
#include "core/problem/fields.def"
#undef TESSERA_TOKEN
#undef TESSERA_FLAG
#undef TESSERA_WORD
#undef TESSERA_INTEGER
#undef TESSERA_NUMBER
#undef TESSERA_TEXT
    {"qscale", true, "one, head or row", "qscale=row",
     [](Case& c, View v) { return scales(v, "row", c.q_scale); }},
    {"kvscale", true, "one, head or block", "kvscale=block",
     [](Case& c, View v) { return scales(v, "block", c.kv_scale); }},
    {"do", true, "a floating dtype", "do=e5m2",
     [](Case& c, View v) { return is_float(c.do_dtype = parse_dtype(v)); }},
    {"o", true, "a floating dtype", "o=fp32",
     [](Case& c, View v) { return is_float(c.o_dtype = parse_dtype(v)); }},
    {"grad", true, "a floating dtype", "grad=fp32",
     [](Case& c, View v) { return is_float(c.grad_dtype = parse_dtype(v)); }},
    FLAG("amax", amax),
    {"precision", true, "fp8", "precision=fp8",
     [](Case& c, View v) { return c.fp8_products = v == "fp8"; }},
    {"smooth", true, "mean+hadamard, mean or none", "smooth=mean",
     [](Case& c, View v) {
       c.has_smooth = true;
       c.smooth = v == "none"   ? 0u
                  : v == "mean" ? uint32_t{TESSERA_SMOOTH_MEAN}
                                : uint32_t{TESSERA_SMOOTH_MEAN | TESSERA_SMOOTH_HADAMARD};
       return v == "none" || v == "mean" || v == "mean+hadamard";
     }},
    {"data", true, "normal, outliers, channels, sink or positive", "data=outliers",
     [](Case& c, View v) {
       c.data = v;
       return v == "normal" || v == "outliers" || v == "channels" || v == "sink" || v == "positive";
     }},
    FLAG("dlse", dlse),
    {"grads", true, "a list of dbias, dsink and dalibi_slopes, each once", "grads=dbias,dsink",
     [](Case& c, View v) {
       for (View name : split(v, ',')) {
         bool* field = name == "dbias"           ? &c.dbias
                       : name == "dsink"         ? &c.dsink
                       : name == "dalibi_slopes" ? &c.dalibi_slopes
                                                 : nullptr;
         if (field == nullptr || *field) return false;
         *field = true;
       }
       return true;
     }},
    FLAG("max_logit", max_logit),
    FLAG("no_lse", no_lse),
    FLAG("strided", strided),
    FLAG("expanded", expanded),
    FLAG("interleaved", interleaved),
    FLAG("out", out),
    FLAG("poison", poison),
    {"seed", true, "an integer in 0..2^32-1", "seed=7",
     [](Case& c, View v) { return seed_of(v, c.seed); }},
};
#undef FLAG

std::span<const Token> tokens() { return kTokens; }

}  // namespace
}  // namespace tessera
