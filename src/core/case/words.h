// SPDX-License-Identifier: Apache-2.0
// The values of a case's words: each function reads one kind and answers whether it is one.
#pragma once

#include <charconv>
#include <cmath>
#include <string_view>
#include <utility>
#include <vector>

#include "core/case/case.h"

namespace tessera::words {

using View = std::string_view;

inline std::vector<View> split(View text, char separator) {
  std::vector<View> parts;
  for (size_t at = 0;;) {
    const size_t end = text.find(separator, at);
    parts.push_back(text.substr(at, end == View::npos ? View::npos : end - at));
    if (end == View::npos) return parts;
    at = end + 1;
  }
}

inline std::string_view format_name(int32_t format) {
  constexpr View kNames[] = {"bshd", "sbhd", "bhsd", "thd"};
  return kNames[format];
}

inline bool integer(View text, int64_t lo, int64_t hi, int64_t& out) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (text.empty() || error != std::errc{} || end != text.data() + text.size()) return false;
  if (value < lo || value > hi) return false;
  out = value;
  return true;
}

inline bool seed_of(View text, uint32_t& out) {
  int64_t value;
  if (!integer(text, 0, 0xFFFFFFFFll, value)) return false;
  out = static_cast<uint32_t>(value);
  return true;
}

inline bool number(View text, double& out) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out);
  return !text.empty() && error == std::errc{} && end == text.data() + text.size() &&
         std::isfinite(out);
}

inline bool after(View text, View prefix, View& rest) {
  if (!text.starts_with(prefix)) return false;
  rest = text.substr(prefix.size());
  return true;
}

inline constexpr int64_t kMaxSize = int64_t{1} << 40;
inline bool size(View text, int64_t lo, int64_t& out) { return integer(text, lo, kMaxSize, out); }

inline bool lengths(View text, CaseLengths& out) {
  View rest;
  if (text == "full") {
    out.kind = CaseLengths::Kind::kFull;
    return true;
  }
  if (after(text, "random:", rest)) {
    out.kind = CaseLengths::Kind::kRandom;
    return seed_of(rest, out.seed);
  }
  out.kind = CaseLengths::Kind::kList;
  for (View part : split(text, ',')) {
    out.list.emplace_back();
    if (!size(part, 0, out.list.back())) return false;
  }
  return true;
}

inline bool scales(View text, View fine, CaseScale& out) {
  out = text == "one" ? CaseScale::kOne : text == "head" ? CaseScale::kHead : CaseScale::kFine;
  return out != CaseScale::kFine || text == fine;
}

// A subset of the letters b, h, q, k, in this order; "1" says that every axis is broadcast.
inline bool shape_letters(View text, std::string& out) {
  if (text == "1") return out.clear(), true;
  size_t at = 0;
  for (char letter : View("bhqk")) at += at < text.size() && text[at] == letter;
  out = text;
  return at == text.size() && !text.empty();
}

inline bool mask(View text, bool drop, CaseMask& out) {
  out.drop = drop;
  const View what = text.substr(0, text.find('/'));
  View rest;
  out.shape = "qk";
  if (after(what, "random:", rest))
    out.what = CaseMask::What::kRandom;
  else if (after(what, "blocks:", rest))
    out.what = CaseMask::What::kBlocks;
  else if (after(what, "keys:", rest))
    out.what = CaseMask::What::kKeys, out.shape = "bk";
  else
    return false;
  if (!number(rest, out.p) || out.p < 0 || out.p > 1) return false;
  if (what.size() < text.size() && !shape_letters(text.substr(what.size() + 1), out.shape))
    return false;
  return out.what != CaseMask::What::kKeys || out.shape.find('q') == std::string::npos;
}

// VALUE,WHERE of bias_low=.
inline bool bias_low(View text, CaseBiasLow& out) {
  using Where = CaseBiasLow::Where;
  const View value = text.substr(0, text.find(','));
  if (value == text) return false;
  if (value == "min")
    out.value = CaseBiasLow::kMinimum;
  else if (!number(value, out.value) || out.value >= 0)
    return false;
  const View where = text.substr(value.size() + 1);
  if (where == "causal") return out.where = Where::kCausal, true;
  View rest;
  if (after(where, "from:", rest)) return out.where = Where::kFrom, size(rest, 0, out.from);
  constexpr std::pair<View, Where> kShares[] = {{"random:", Where::kRandom},
                                                {"keys:", Where::kKeys},
                                                {"rows:", Where::kRows},
                                                {"blocks:", Where::kBlocks}};
  for (const auto& [name, kind] : kShares) {
    if (!after(where, name, rest)) continue;
    out.where = kind;
    return number(rest, out.p) && out.p > 0 && out.p <= 1;
  }
  return false;
}

inline bool format(View name, int32_t& out) {
  for (int32_t f : {TESSERA_BSHD, TESSERA_SBHD, TESSERA_BHSD, TESSERA_THD}) {
    if (name == format_name(f)) return out = f, true;
  }
  return false;
}

inline bool read_layout(CaseLayout& layout, View name) {
  using Packing = CaseLayout::Packing;
  layout = {std::string(name)};
  View te = name;
  const bool paged = after(te, "paged_kv_", te);
  struct Packed {
    View name;
    int32_t format;
    Packing packing;
  };
  static constexpr Packed kPacked[] = {
      {"sb3hd", TESSERA_SBHD, Packing::kQkvBeforeHeads},
      {"sbh3d", TESSERA_SBHD, Packing::kQkvAfterHeads},
      {"sbhd_sb2hd", TESSERA_SBHD, Packing::kKvBeforeHeads},
      {"sbhd_sbh2d", TESSERA_SBHD, Packing::kKvAfterHeads},
      {"bs3hd", TESSERA_BSHD, Packing::kQkvBeforeHeads},
      {"bsh3d", TESSERA_BSHD, Packing::kQkvAfterHeads},
      {"bshd_bs2hd", TESSERA_BSHD, Packing::kKvBeforeHeads},
      {"bshd_bsh2d", TESSERA_BSHD, Packing::kKvAfterHeads},
      {"t3hd", TESSERA_THD, Packing::kQkvBeforeHeads},
      {"th3d", TESSERA_THD, Packing::kQkvAfterHeads},
      {"thd_t2hd", TESSERA_THD, Packing::kKvBeforeHeads},
      {"thd_th2d", TESSERA_THD, Packing::kKvAfterHeads},
  };
  for (const Packed& p : kPacked) {
    if (!paged && name == p.name) {
      layout.format_q = layout.format_kv = p.format;
      layout.packing = p.packing;
      return true;
    }
  }
  if (format(name, layout.format_q)) return layout.format_kv = layout.format_q, true;
  const auto pair = split(name, ',');
  if (pair.size() == 2)
    return format(pair[0], layout.format_q) && format(pair[1], layout.format_kv);
  const auto parts = split(te, '_');
  return parts.size() == 3 && parts[1] == parts[2] && format(parts[0], layout.format_q) &&
         format(parts[1], layout.format_kv) && !(paged && layout.format_kv == TESSERA_THD);
}

}  // namespace tessera::words
