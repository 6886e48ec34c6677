// SPDX-License-Identifier: Apache-2.0
// The canonical line of a case: keys in the order of docs/cases.md, defaults left out.
#include <charconv>
#include <utility>

#include "core/case/case.h"
#include "core/problem/fields.h"

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
  void flags(uint32_t set) {
    for_each_token(set, [&](const Field& flag) { word(std::string(flag.words)); });
  }
  void size(const char* name, int64_t value) { word(name + ("=" + std::to_string(value))); }
  void pair(const char* both, const char* first, int64_t a, const char* second, int64_t b) {
    if (a == b) return size(both, a);
    size(first, a);
    size(second, b);
  }
  void scale(const std::string& name, CaseScale scale, const char* fine) {
    const char* const kind[] = {"", "one", "head", fine};
    if (scale != CaseScale::kNone) word(name + "=" + kind[static_cast<int>(scale)]);
  }
  void dtype(const std::string& name, int32_t value) {
    if (value != TESSERA_NONE) word(name + "=" + std::string(dtype_name(value)));
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

std::string shape_or_one(const std::string& letters) { return letters.empty() ? "1" : letters; }

void write_sizes(const Case& c, Writer& w) {
  w.size("b", c.b);
  w.pair("s", "sq", c.sq, "sk", c.sk);
  w.pair("h", "hq", c.hq, "hk", c.hk);
  w.pair("d", "dqk", c.dqk, "dv", c.dv);
}

void write_storage(const Case& c, Writer& w) {
  w.dtype("kv", c.kv_dtype);
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
}

void write_band(const Case& c, Writer& w) {
  w.flag("causal", c.causal);
  if (c.window)
    w.word("window=" + std::to_string(c.window_left) + "," + std::to_string(c.window_right));
  if (c.align != TESSERA_ALIGN_NONE) {
    w.word(c.align == TESSERA_ALIGN_TOP_LEFT ? "align=top_left" : "align=bottom_right");
  }
  if (c.shift.kind == CaseShift::Kind::kOne) w.size("shift", c.shift.value);
  if (c.shift.kind == CaseShift::Kind::kRandom) {
    w.word("shift=random:" + std::to_string(c.shift.value));
  }
  w.lengths("q_start", c.q_start);
  w.lengths("k_start", c.k_start);
}

void write_masks(const Case& c, Writer& w) {
  if (c.mask.what != CaseMask::What::kNone) {
    const char* const what[] = {"", "random:", "keys:", "blocks:"};
    w.word((c.mask.drop ? "drop=" : "keep=") + std::string(what[static_cast<int>(c.mask.what)]) +
           number(c.mask.p) + "/" + shape_or_one(c.mask.shape));
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
}

std::string low_text(const CaseBiasLow& low) {
  using Where = CaseBiasLow::Where;
  const std::string value = low.value == CaseBiasLow::kMinimum ? "min" : number(low.value);
  const char* const where[] = {"", "random:", "keys:", "rows:", "blocks:", "from:", "causal"};
  const std::string name = value + "," + where[static_cast<int>(low.where)];
  if (low.where == Where::kCausal) return name;
  return name + (low.where == Where::kFrom ? std::to_string(low.from) : number(low.p));
}

void write_score(const Case& c, Writer& w) {
  if (c.has_scale) w.word("scale=" + number(c.scale));
  if (c.softcap > 0) w.word("softcap=" + number(c.softcap));
  if (c.bias != Case::BiasAt::kNone) {
    w.word((c.bias == Case::BiasAt::kPre ? "bias=pre/" : "bias=post/") +
           shape_or_one(c.bias_shape));
  }
  if (c.bias_inf > 0) w.word("bias_inf=" + number(c.bias_inf));
  if (c.bias_low.where != CaseBiasLow::Where::kNone) w.word("bias_low=" + low_text(c.bias_low));
  w.dtype("bias_dtype", c.bias_dtype);
  if (c.alibi != Case::Alibi::kNone)
    w.word(c.alibi == Case::Alibi::kPerHead ? "alibi" : "alibi=bh");
  if (c.sink != Case::Sink::kNone) {
    w.word(c.sink == Case::Sink::kOffByOne ? "sink=off_by_one"
           : c.sink_value != 0             ? "sink=" + number(c.sink_value)
                                           : "sink=learnable");
  }
  if (c.dropout > 0) w.word("dropout=" + number(c.dropout));
  if (c.four_words) {
    w.word("rng=" + std::to_string(c.rng_first) + "," + std::to_string(c.rng_stride));
  }
}

void write_precision(const Case& c, Writer& w) {
  w.flags(c.flags & ~kModes);
  w.scale("qscale", c.q_scale, "row");
  w.scale("kvscale", c.kv_scale, "block");
  w.dtype("do", c.do_dtype);
  w.dtype("o", c.o_dtype);
  w.dtype("grad", c.grad_dtype);
  w.flag("amax", c.amax);
  w.flag("precision=fp8", c.fp8_products);
  if (c.has_smooth) {
    w.word((c.smooth & TESSERA_SMOOTH_HADAMARD) != 0 ? "smooth=mean+hadamard"
           : c.smooth != 0                           ? "smooth=mean"
                                                     : "smooth=none");
  }
  if (c.data != "normal") w.word("data=" + c.data);
}

void write_outputs(const Case& c, Writer& w) {
  w.flag("dlse", c.dlse);
  if (c.dbias || c.dsink || c.dalibi_slopes) {
    std::string grads;
    if (c.dbias) grads += ",dbias";
    if (c.dsink) grads += ",dsink";
    if (c.dalibi_slopes) grads += ",dalibi_slopes";
    w.word("grads=" + grads.substr(1));
  }
  w.flag("max_logit", c.max_logit);
  w.flag("no_lse", c.no_lse);
}

void write_data(const Case& c, Writer& w) {
  w.flags(c.flags & kModes);
  w.flag("strided", c.strided);
  w.flag("expanded", c.expanded);
  w.flag("interleaved", c.interleaved);
  w.flag("out", c.out);
  w.flag("poison", c.poison);
  if (c.seed != 0) w.size("seed", c.seed);
}

}  // namespace

std::string to_text(const Case& c) {
  Writer w;
  w.line = c.pass == TESSERA_BACKWARD ? "bwd" : "fwd";
  w.word(std::string(dtype_name(c.dtype)));
  for (const auto write : {write_sizes, write_storage, write_band, write_masks, write_score,
                           write_precision, write_outputs, write_data}) {
    write(c, w);
  }
  return w.line;
}

}  // namespace tessera
