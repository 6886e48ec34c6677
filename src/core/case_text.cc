// SPDX-License-Identifier: Apache-2.0
// The canonical line of a case: keys in the order of docs/cases.md, defaults left out.
#include <charconv>

#include "core/case.h"

namespace tessera {
namespace {

std::string number(double value) {
  char text[40];
  return {text, std::to_chars(text, text + sizeof text, value).ptr};
}

struct Writer {
  std::string line;
  void word(const std::string& text) { line += " " + text; }
  void flag(const char* name, bool on) {
    if (on) word(name);
  }
  void size(const char* name, int64_t value) { word(name + ("=" + std::to_string(value))); }
  void pair(const char* both, const char* first, int64_t a, const char* second, int64_t b) {
    if (a == b) return size(both, a);
    size(first, a);
    size(second, b);
  }
  void lengths(const std::string& name, const CaseLengths& lens) {
    using Kind = CaseLengths::Kind;
    if (lens.kind == Kind::kAbsent) return;
    std::string text = lens.kind == Kind::kFull ? "full" : "";
    if (lens.kind == Kind::kRandom) text = "random:" + std::to_string(lens.seed);
    for (size_t n = 0; n < lens.list.size(); ++n)
      text += (n ? "," : "") + std::to_string(lens.list[n]);
    word(name + "=" + text);
  }
};

}  // namespace

std::string to_text(const Case& c) {
  Writer w;
  w.line = c.pass == TESSERA_BACKWARD ? "bwd" : "fwd";
  w.word(std::string(dtype_name(c.dtype)));
  w.size("b", c.b);
  w.pair("s", "sq", c.sq, "sk", c.sk);
  w.pair("h", "hq", c.hq, "hk", c.hk);
  w.pair("d", "dqk", c.dqk, "dv", c.dv);
  if (c.kv_dtype != TESSERA_NONE) w.word("kv=" + std::string(dtype_name(c.kv_dtype)));
  if (c.layout.name != "bshd") w.word("layout=" + c.layout.name);
  w.lengths("lens", c.lens);
  w.lengths("lens_q", c.lens_q);
  w.lengths("lens_k", c.lens_k);
  if (c.gaps.kind != CaseGaps::Kind::kNone) {
    w.word((c.gaps.kind == CaseGaps::Kind::kRandom ? "gaps=random:" : "gaps=") +
           std::to_string(c.gaps.value));
  }
  if (c.page > 0) w.size("page", c.page);
  if (c.tables == 2) w.size("tables", 2);
  w.flag("int64", c.int64_lengths);
  w.flag("causal", c.causal);
  if (c.window)
    w.word("window=" + std::to_string(c.window_left) + "," + std::to_string(c.window_right));
  if (c.align != TESSERA_ALIGN_NONE) {
    w.word(c.align == TESSERA_ALIGN_TOP_LEFT ? "align=top_left" : "align=bottom_right");
  }
  const auto shape = [](const std::string& letters) {
    return letters.empty() ? std::string("1") : letters;
  };
  if (c.mask.what != CaseMask::What::kNone) {
    const char* const what[] = {"", "random:", "keys:", "blocks:"};
    w.word((c.mask.drop ? "drop=" : "keep=") + std::string(what[static_cast<int>(c.mask.what)]) +
           number(c.mask.p) + "/" + shape(c.mask.shape));
  }
  if (c.ranges.kind != CaseRanges::Kind::kNone) {
    const char* const kind[] = {"", "random:", "two:", "prefix:"};
    w.word("ranges=" + std::string(kind[static_cast<int>(c.ranges.kind)]) +
           std::to_string(c.ranges.value));
  }
  if (c.segments.ids > 0) {
    const char* const kind[] = {"", "again:", "random:"};
    w.word("segments=" + std::string(kind[static_cast<int>(c.segments.kind)]) +
           std::to_string(c.segments.ids));
  }
  if (c.has_scale) w.word("scale=" + number(c.scale));
  if (c.softcap > 0) w.word("softcap=" + number(c.softcap));
  if (c.bias != Case::BiasAt::kNone) {
    w.word((c.bias == Case::BiasAt::kPre ? "bias=pre/" : "bias=post/") + shape(c.bias_shape));
  }
  if (c.bias_inf > 0) w.word("bias_inf=" + number(c.bias_inf));
  if (c.bias_dtype != TESSERA_NONE) w.word("bias_dtype=" + std::string(dtype_name(c.bias_dtype)));
  if (c.alibi != Case::Alibi::kNone)
    w.word(c.alibi == Case::Alibi::kPerHead ? "alibi" : "alibi=bh");
  if (c.sink != Case::Sink::kNone) {
    w.word(c.sink == Case::Sink::kLearnable ? "sink=learnable" : "sink=off_by_one");
  }
  if (c.dropout > 0) w.word("dropout=" + number(c.dropout));
  w.flag("dlse", c.dlse);
  if (c.dbias || c.dsink || c.dalibi_slopes) {
    std::string grads;
    if (c.dbias) grads += ",dbias";
    if (c.dsink) grads += ",dsink";
    if (c.dalibi_slopes) grads += ",dalibi_slopes";
    w.word("grads=" + grads.substr(1));
  }
  w.flag("max_logit", c.max_logit);
  w.flag("deterministic", c.deterministic);
  w.flag("batch_invariant", c.batch_invariant);
  w.flag("strided", c.strided);
  w.flag("expanded", c.expanded);
  w.flag("interleaved", c.interleaved);
  w.flag("out", c.out);
  w.flag("poison", c.poison);
  if (c.seed != 0) w.size("seed", c.seed);
  return w.line;
}

}  // namespace tessera
