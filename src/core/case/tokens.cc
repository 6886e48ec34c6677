// SPDX-License-Identifier: Apache-2.0
// One row for each token of a case: how it is read and written, what the problem has of it, and
// which keyword front ends pass for it.
#include "core/case/tokens.h"

#include <utility>

#include "core/case/token_kinds.h"
#include "core/case/words.h"

namespace tessera {
namespace {

using namespace words;        // NOLINT: the readers and writers of values
using namespace token_kinds;  // NOLINT: the rows that are like others

constexpr View kSize = "a size in 0..2^40", kPositive = "a size in 1..2^40";
constexpr View kList = "full, n,n,... or random:SEED", kStarts = "n,n,... or random:SEED";
constexpr View kDtype = "a floating dtype";
constexpr View kMask =
    "random:P, keys:P or blocks:P, P in [0, 1], with /SHAPE of letters of bhqk in this "
    "order (keys without q)";
constexpr uint32_t kSmooth = TESSERA_SMOOTH_MEAN | TESSERA_SMOOTH_HADAMARD;
constexpr std::pair<View, bool Case::*> kGrads[] = {
    {"dbias", &Case::dbias}, {"dsink", &Case::dsink}, {"dalibi_slopes", &Case::dalibi_slopes}};
constexpr View kLow =
    "VALUE,WHERE: a finite number below 0 or min (of the dtype), and random:P, keys:P, rows:P, "
    "blocks:P with P in (0, 1], from:KEY or causal";

// ---- what front ends pass otherwise than the token has it ----

void tell_layout(const Case&, const Problem& p, Json& json) {
  json.key("layout");
  // A paged pool has a format of its own, which is that of k and v.
  if (is_paged(p) || p.format_q == p.format_kv) {
    json.string(format_name(p.format_q));
  } else {
    json.begin_array().string(format_name(p.format_q)).string(format_name(p.format_kv)).end_array();
  }
}

void tell_dtype(const char* keyword, int32_t dtype, Json& json) {
  constexpr View kNumpy[] = {"",        "float32",       "bfloat16",   "float16",
                             "float64", "float8_e4m3fn", "float8_e5m2"};
  if (dtype != TESSERA_NONE) json.key(keyword).string(kNumpy[dtype]);
}

constexpr Token window() {
  Token token = pair<&Case::window, &Case::window_left, &Case::window_right, -1, INT64_MAX>(
      "window", "L,R, each -1 (unbounded) or more", "window=128,0");
  token.put = [](const Case& c, Geometry& g) {
    if (!c.window) return;
    g.problem.flags |= TESSERA_WINDOW;
    g.problem.window_left = c.window_left, g.problem.window_right = c.window_right;
  };
  token.keyword = "window";
  return token;
}

// ---- the rows ----

constexpr Token kTokens[] = {
    {.key = "b",
     .rule = kSize,
     .example = "b=2",
     .read = [](Case& c, View v) { return size(v, 0, c.b); },
     .write = [](const Case& c, Text& v) { return v = std::to_string(c.b), true; }},
    both<&Case::sq, &Case::sk, 0>("s", kSize, "s=128"),
    told(one<&Case::sq, &Case::sk, 0>("sq", kSize, "sq=128"),
         [](const Case&, const Problem& p, Json& json) {
           if (has(p, TESSERA_MAX_SEQLEN_Q)) json.key("max_seqlen_q").number(p.max_seqlen_q);
         }),
    told(one<&Case::sk, &Case::sq, 0>("sk", kSize, "sk=128"),
         [](const Case&, const Problem& p, Json& json) {
           if (has(p, TESSERA_MAX_SEQLEN_K)) json.key("max_seqlen_k").number(p.max_seqlen_k);
         }),
    both<&Case::hq, &Case::hk, 1>("h", kPositive, "h=4"),
    one<&Case::hq, &Case::hk, 1>("hq", kPositive, "hq=8"),
    one<&Case::hk, &Case::hq, 1>("hk", kPositive, "hk=2"),
    both<&Case::dqk, &Case::dv, 1>("d", kPositive, "d=64"),
    one<&Case::dqk, &Case::dv, 1>("dqk", kPositive, "dqk=192"),
    one<&Case::dv, &Case::dqk, 1>("dv", kPositive, "dv=128"),
    dtype<&Case::kv_dtype>("kv", kDtype, "kv=e4m3"),
    {.key = "layout",
     .rule = "a format (bshd, sbhd, bhsd, thd), two of them (q and k/v) or a layout of "
             "TransformerEngine",
     .example = "layout=sbhd or layout=bshd,sbhd or layout=bs3hd",
     .read = [](Case& c, View v) { return read_layout(c.layout, v); },
     .write = [](const Case& c, Text& v) { return (v = c.layout.name) != "bshd"; },
     .tell = tell_layout},
    flag<&Case::longest>("longest"),
    list<&Case::lens, true>("lens", kList, "lens=5,17"),
    list<&Case::lens_q, true>("lens_q", kList, "lens_q=5,17"),
    list<&Case::lens_k, true>("lens_k", kList, "lens_k=random:3"),
    {.key = "gaps",
     .rule = "a number of tokens or random:SEED",
     .example = "gaps=3",
     .read =
         [](Case& c, View v) {
           return after_kind(v, kGaps, c.gaps.kind) && integer(v, 0, 0xFFFFFFFFll, c.gaps.value);
         },
     .write = [](const Case& c, Text& v) { return write(kGaps, c.gaps.kind, c.gaps.value, v); }},
    count<&Case::page>("page", "a number of tokens of at least 1", "page=16"),
    {.key = "tables",
     .rule = "1 or 2",
     .example = "tables=2",
     .read = [](Case& c, View v) { return integer(v, 1, 2, c.tables); },
     .write = [](const Case& c, Text& v) { return v = "2", c.tables == 2; }},
    flag<&Case::int64_lengths>("int64"),
    flag<&Case::causal, TESSERA_CAUSAL>("causal", "causal"),
    window(),
    {.key = "windows",
     .rule = "random:SEED",
     .example = "windows=random:3",
     .read =
         [](Case& c, View v) {
           c.has_windows = after(v, "random:", v) && seed_of(v, c.windows_seed);
           return c.has_windows;
         },
     .write =
         [](const Case& c, Text& v) {
           v = "random:" + std::to_string(c.windows_seed);
           return c.has_windows;
         }},
    {.key = "align",
     .rule = "top_left or bottom_right",
     .example = "align=bottom_right",
     .read =
         [](Case& c, View v) {
           c.align = v == "top_left" ? TESSERA_ALIGN_TOP_LEFT : TESSERA_ALIGN_BOTTOM_RIGHT;
           return v == "top_left" || v == "bottom_right";
         },
     .write =
         [](const Case& c, Text& v) {
           v = c.align == TESSERA_ALIGN_TOP_LEFT ? "top_left" : "bottom_right";
           return c.align != TESSERA_ALIGN_NONE;
         },
     .put = [](const Case& c, Geometry& g) { g.problem.align = c.align; },
     .keyword = "align"},
    {.key = "shift",
     .rule = "an integer or random:SEED",
     .example = "shift=-3",
     .read =
         [](Case& c, View v) {
           if (!after_kind(v, kShifts, c.shift.kind)) return false;
           const bool random = c.shift.kind == CaseShift::Kind::kRandom;
           return integer(v, random ? 0 : -kMaxSize, kMaxSize, c.shift.value);
         },
     .write = [](const Case& c, Text& v) { return write(kShifts, c.shift.kind, c.shift.value, v); },
     .put =
         [](const Case& c, Geometry& g) {  // after align's, which it overrules
           if (c.shift.kind != CaseShift::Kind::kNone) g.problem.align = TESSERA_ALIGN_GIVEN;
           if (c.shift.kind == CaseShift::Kind::kOne) g.problem.shift = c.shift.value;
         },
     .tell =
         [](const Case& c, const Problem&, Json& json) {
           if (c.shift.kind == CaseShift::Kind::kOne) json.key("align").number(c.shift.value);
         }},
    list<&Case::q_start, false>("q_start", kStarts, "q_start=4,0"),
    list<&Case::k_start, false>("k_start", kStarts, "k_start=random:5"),
    {.key = "keep",
     .rule = kMask,
     .example = "keep=random:0.7/bqk",
     .read = [](Case& c, View v) { return mask(v, false, c.mask); },
     .write = [](const Case& c, Text& v) { return write(c.mask, false, v); }},
    {.key = "drop",
     .rule = kMask,
     .example = "drop=keys:0.7",
     .read = [](Case& c, View v) { return mask(v, true, c.mask); },
     .write = [](const Case& c, Text& v) { return write(c.mask, true, v); },
     .put =
         [](const Case& c, Geometry& g) {
           if (c.mask.drop) g.problem.flags |= TESSERA_MASK_DROP;
         }},
    {.key = "ranges",
     .rule = "random:SEED, two:SEED or prefix:N",
     .example = "ranges=prefix:16",
     .read =
         [](Case& c, View v) {
           return after_kind(v, kRanges, c.ranges.kind) &&
                  integer(v, 0, 0x7FFFFFFF, c.ranges.value);
         },
     .write = [](const Case& c,
                 Text& v) { return write(kRanges, c.ranges.kind, c.ranges.value, v); }},
    {.key = "segments",
     .rule = "N, again:N or random:N, N in 1..2^20",
     .example = "segments=3",
     .read =
         [](Case& c, View v) {
           return after_kind(v, kSegments, c.segments.kind) &&
                  integer(v, 1, 1 << 20, c.segments.ids);
         },
     .write =
         [](const Case& c, Text& v) {
           return write(kSegments, c.segments.kind, c.segments.ids, v) && c.segments.ids > 0;
         }},
    {.key = "scale",
     .rule = "a finite number of at least 0",
     .example = "scale=0.125",
     .read = [](Case& c,
                View v) { return c.has_scale = words::number(v, c.scale) && c.scale >= 0; },
     .write = [](const Case& c, Text& v) { return v = text_of(c.scale), c.has_scale; },
     .put =
         [](const Case& c, Geometry& g) {
           g.problem.flags |= c.has_scale ? TESSERA_SOFTMAX_SCALE : 0;
           g.softmax_scale = c.scale;
         },
     .keyword = "softmax_scale"},
    number<&Case::softcap, positive, TESSERA_SOFTCAP, &Geometry::softcap>(
        "softcap", "a finite number above 0", "softcap=30", "softcap"),
    {.key = "bias",
     .rule = "post or pre, with /SHAPE of letters of bhqk in this order",
     .example = "bias=post/hqk",
     .read =
         [](Case& c, View v) {
           const View at = v.substr(0, v.find('/'));
           c.bias = at == "pre" ? Case::BiasAt::kPre : Case::BiasAt::kPost;
           c.bias_shape = "hqk";
           return (at == "pre" || at == "post") &&
                  (at.size() == v.size() || shape_letters(v.substr(at.size() + 1), c.bias_shape));
         },
     .write =
         [](const Case& c, Text& v) {
           v = (c.bias == Case::BiasAt::kPre ? "pre/" : "post/") + shape_or_one(c.bias_shape);
           return c.bias != Case::BiasAt::kNone;
         },
     .put =
         [](const Case& c, Geometry& g) {
           if (c.bias == Case::BiasAt::kPre) g.problem.flags |= TESSERA_BIAS_PRE_SCALE;
         },
     .tell =
         [](const Case& c, const Problem&, Json& json) {
           if (c.bias == Case::BiasAt::kNone) return;
           json.key("bias_at").string(c.bias == Case::BiasAt::kPre ? "pre_scale" : "post_scale");
         }},
    number<&Case::bias_inf, share>("bias_inf", "a probability in (0, 1]", "bias_inf=0.3"),
    {.key = "bias_low",
     .rule = kLow,
     .example = "bias_low=min,keys:0.3",
     .read = [](Case& c, View v) { return bias_low(v, c.bias_low); },
     .write = [](const Case& c, Text& v) { return write(c.bias_low, v); }},
    {.key = "bias_dtype",
     .rule = "fp32, or left out for the dtype of q",
     .example = "bias_dtype=fp32",
     .read = [](Case& c, View v) { return v == "fp32" && (c.bias_dtype = TESSERA_FP32); },
     .write = [](const Case& c, Text& v) { return v = "fp32", c.bias_dtype != TESSERA_NONE; }},
    {.key = "alibi",
     .rule = "alone (a slope for each head) or bh (for each batch and head)",
     .example = "alibi=bh",
     .takes = Token::kEither,
     .read =
         [](Case& c, View v) {
           c.alibi = v.empty() ? Case::Alibi::kPerHead : Case::Alibi::kPerBatchHead;
           return v.empty() || v == "bh";
         },
     .write =
         [](const Case& c, Text& v) {
           v = c.alibi == Case::Alibi::kPerBatchHead ? "bh" : "";
           return c.alibi != Case::Alibi::kNone;
         }},
    {.key = "sink",
     .rule = "off_by_one, learnable or a finite number other than 0 (of every head)",
     .example = "sink=learnable",
     .read =
         [](Case& c, View v) {
           c.sink = v == "off_by_one" ? Case::Sink::kOffByOne : Case::Sink::kLearnable;
           const bool drawn = v == "off_by_one" || v == "learnable";
           return drawn || (words::number(v, c.sink_value) && c.sink_value != 0);
         },
     .write =
         [](const Case& c, Text& v) {
           v = c.sink == Case::Sink::kOffByOne ? "off_by_one"
               : c.sink_value != 0             ? text_of(c.sink_value)
                                               : "learnable";
           return c.sink != Case::Sink::kNone;
         },
     .put =
         [](const Case& c, Geometry& g) {
           if (c.sink == Case::Sink::kOffByOne) g.problem.flags |= TESSERA_SINK_OFF_BY_ONE;
         },
     .tell =
         [](const Case& c, const Problem&, Json& json) {
           if (c.sink == Case::Sink::kOffByOne) json.key("sink").string("off_by_one");
         }},
    number<&Case::dropout, share_below_one, TESSERA_DROPOUT, &Geometry::dropout_p>(
        "dropout", "a probability in (0, 1)", "dropout=0.1", "dropout_p"),
    pair<&Case::four_words, &Case::rng_first, &Case::rng_stride, 0, kMaxSize>(
        "rng", "FIRST,STRIDE, each at least 0", "rng=4,16"),
// Only v_in_k is no keyword: front ends see it in the arrays.
#define TESSERA_TOKEN(BIT, name, token) \
  bit_of_flags<BIT>(token, BIT == TESSERA_V_IN_K ? View{} : View{#name}),
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
    {.key = "qscale",
     .rule = "one, head or row",
     .example = "qscale=row",
     .read = [](Case& c, View v) { return scales(v, "row", c.q_scale); },
     .write = [](const Case& c, Text& v) { return write(c.q_scale, "row", v); }},
    {.key = "kvscale",
     .rule = "one, head or block",
     .example = "kvscale=block",
     .read = [](Case& c, View v) { return scales(v, "block", c.kv_scale); },
     .write = [](const Case& c, Text& v) { return write(c.kv_scale, "block", v); },
     .tell =
         [](const Case&, const Problem& p, Json& json) {
           if (p.q_scale_block == 0 && p.k_scale_block == 0) return;
           json.key("scale_block").begin_array();
           json.number(p.q_scale_block).number(p.k_scale_block).end_array();
         }},
    dtype<&Case::do_dtype>("do", kDtype, "do=e5m2"),
    told(dtype<&Case::o_dtype>("o", kDtype, "o=fp32"),
         [](const Case& c, const Problem& p, Json& json) {
           if (!is_backward(p)) tell_dtype("out_dtype", c.o_dtype, json);
         }),
    told(dtype<&Case::grad_dtype>("grad", kDtype, "grad=fp32"),
         [](const Case& c, const Problem&, Json& json) {
           tell_dtype("grad_dtype", c.grad_dtype, json);
         }),
    flag<&Case::amax>("amax", "return_amax"),
    {.key = "precision",
     .rule = "fp8",
     .example = "precision=fp8",
     .read = [](Case& c, View v) { return c.fp8_products = v == "fp8"; },
     .write = [](const Case& c, Text& v) { return v = "fp8", c.fp8_products; },
     .put =
         [](const Case& c, Geometry& g) {
           if (c.fp8_products) g.problem.flags |= TESSERA_FP8_PRODUCTS;
         },
     .keyword = "precision"},
    {.key = "smooth",
     .rule = "mean+hadamard, mean or none",
     .example = "smooth=mean",
     .read =
         [](Case& c, View v) {
           c.has_smooth = true;
           c.smooth = v == "none" ? 0u : v == "mean" ? uint32_t{TESSERA_SMOOTH_MEAN} : kSmooth;
           return v == "none" || v == "mean" || v == "mean+hadamard";
         },
     .write =
         [](const Case& c, Text& v) {
           v = c.smooth == kSmooth ? "mean+hadamard" : c.smooth != 0 ? "mean" : "none";
           return c.has_smooth;
         },
     .put =
         [](const Case& c, Geometry& g) {
           if (c.fp8_products) g.problem.flags |= c.has_smooth ? c.smooth : kSmooth;
         },
     .keyword = "smooth"},
    {.key = "data",
     .rule = "normal, outliers, channels, sink, positive or opposed",
     .example = "data=outliers",
     .read =
         [](Case& c, View v) {
           c.data = v;
           return v == "normal" || v == "outliers" || v == "channels" || v == "sink" ||
                  v == "positive" || v == "opposed";
         },
     .write = [](const Case& c, Text& v) { return (v = c.data) != "normal"; }},
    flag<&Case::dlse>("dlse"),
    {.key = "grads",
     .rule = "a list of dbias, dsink and dalibi_slopes, each once",
     .example = "grads=dbias,dsink",
     .read =
         [](Case& c, View v) {
           for (View name : split(v, ',')) {
             bool Case::*const* row = nullptr;
             for (const auto& [known, member] : kGrads)
               if (name == known) row = &member;
             if (row == nullptr || c.**row) return false;
             c.** row = true;
           }
           return true;
         },
     .write =
         [](const Case& c, Text& v) {
           for (const auto& [name, member] : kGrads)
             if (c.*member) v += (v.empty() ? "" : ",") + Text(name);
           return !v.empty();
         }},
    flag<&Case::max_logit>("max_logit", "return_max_logit"),
    told(flag<&Case::no_lse>("no_lse"),
         [](const Case& c, const Problem& p, Json& json) {
           if (!is_backward(p) && !c.no_lse) json.key("return_lse").boolean(true);
         }),
    flag<&Case::strided>("strided", {}, Token::kStored),
    flag<&Case::expanded>("expanded", {}, Token::kStored),
    flag<&Case::interleaved>("interleaved", {}, Token::kStored),
    flag<&Case::out>("out", {}, Token::kStored),
    flag<&Case::poison>("poison", {}, Token::kStored),
    {.key = "seed",
     .rule = "an integer in 0..2^32-1",
     .example = "seed=7",
     .read = [](Case& c, View v) { return seed_of(v, c.seed); },
     .write = [](const Case& c, Text& v) { return v = std::to_string(c.seed), c.seed != 0; },
     .part = Token::kStored},
};

}  // namespace

std::span<const Token> tokens() { return kTokens; }

}  // namespace tessera
