// SPDX-License-Identifier: Apache-2.0
// The values of a case's words: each function reads one kind and answers whether it is one, or
// writes it.
#pragma once

#include <charconv>
#include <cmath>
#include <string>
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

// Kinds that begin with a word of their own, before a number; the last one's word may be "".
template <typename Kind>
struct KindWord {
  View word;
  Kind kind;
};
inline constexpr KindWord<CaseGaps::Kind> kGaps[] = {{"random:", CaseGaps::Kind::kRandom},
                                                     {"", CaseGaps::Kind::kFixed}};
inline constexpr KindWord<CaseShift::Kind> kShifts[] = {{"random:", CaseShift::Kind::kRandom},
                                                        {"", CaseShift::Kind::kOne}};
inline constexpr KindWord<CaseRanges::Kind> kRanges[] = {{"random:", CaseRanges::Kind::kRandom},
                                                         {"two:", CaseRanges::Kind::kTwo},
                                                         {"prefix:", CaseRanges::Kind::kPrefix}};
inline constexpr KindWord<CaseSegments::Kind> kSegments[] = {
    {"again:", CaseSegments::Kind::kAgain},
    {"random:", CaseSegments::Kind::kRandom},
    {"", CaseSegments::Kind::kOnce}};

// Takes the kind's word off the text.
template <typename Kind, size_t count>
bool after_kind(View& text, const KindWord<Kind> (&words)[count], Kind& kind) {
  for (const auto& word : words) {
    if (after(text, word.word, text)) return kind = word.kind, true;
  }
  return false;
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

// ---- and the values as words: each function answers whether there is one ----

inline std::string text_of(double value) {
  char text[40];
  return {text, std::to_chars(text, text + sizeof text, value).ptr};
}

inline bool write(const CaseLengths& lens, std::string& out) {
  using Kind = CaseLengths::Kind;
  if (lens.kind == Kind::kFull) out = "full";
  if (lens.kind == Kind::kRandom) out = "random:" + std::to_string(lens.seed);
  for (size_t n = 0; n < lens.list.size(); ++n)
    out += (n ? "," : "") + std::to_string(lens.list[n]);
  return lens.kind != Kind::kAbsent;
}

template <typename Kind, size_t count>
bool write(const KindWord<Kind> (&words)[count], Kind kind, int64_t value, std::string& out) {
  for (const auto& word : words) {
    if (word.kind == kind) return out = std::string(word.word) + std::to_string(value), true;
  }
  return false;
}

inline bool write(CaseScale scale, const char* fine, std::string& out) {
  const char* const kind[] = {"", "one", "head", fine};
  out = kind[static_cast<int>(scale)];
  return scale != CaseScale::kNone;
}

inline std::string shape_or_one(const std::string& letters) {
  return letters.empty() ? "1" : letters;
}

inline bool write(const CaseMask& mask, bool drop, std::string& out) {
  const char* const what[] = {"", "random:", "keys:", "blocks:"};
  out = what[static_cast<int>(mask.what)] + text_of(mask.p) + "/" + shape_or_one(mask.shape);
  return mask.what != CaseMask::What::kNone && mask.drop == drop;
}

inline bool write(const CaseBiasLow& low, std::string& out) {
  using Where = CaseBiasLow::Where;
  const char* const where[] = {"", "random:", "keys:", "rows:", "blocks:", "from:", "causal"};
  out = low.value == CaseBiasLow::kMinimum ? "min" : text_of(low.value);
  out += std::string(",") + where[static_cast<int>(low.where)];
  if (low.where == Where::kFrom)
    out += std::to_string(low.from);
  else if (low.where != Where::kCausal)
    out += text_of(low.p);
  return low.where != Where::kNone;
}

}  // namespace tessera::words
