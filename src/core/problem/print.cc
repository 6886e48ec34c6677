// SPDX-License-Identifier: Apache-2.0
// A problem as people read it: shapes in the caller's order of axes, and the case line.
#include <algorithm>

#include "core/case/tokens.h"
#include "core/problem/problem.h"

namespace tessera {
namespace {

constexpr const char* kFormats[] = {"bshd", "sbhd", "bhsd", "thd"};

// A case has lengths where a problem has only their kind; these stand for "some".
constexpr int64_t kListedLengths = 64;  // longer batches print a seed

class CaseLine {
 public:
  explicit CaseLine(const Problem& problem) : p_(problem), s_(sizes_of(problem)) {}

  std::string text() {
    word(is_backward(p_) ? "bwd" : "fwd");
    word(std::string(dtype_name(p_.tensor[TESSERA_Q].dtype)));
    sizes();
    layout();
    band();
    mask();
    score();
    other();
    line_.pop_back();
    return std::move(line_);
  }

 private:
  void word(const std::string& text) { line_ += text + " "; }
  void number(const char* key, int64_t value) { word(key + ("=" + std::to_string(value))); }
  void pair(const char* both, const char* first, const char* second, int64_t a, int64_t b) {
    if (a == b) return number(both, a);
    number(first, a);
    number(second, b);
  }
  int32_t dtype(int index) const { return p_.tensor[index].dtype; }

  // Tokens of a side that are not in a gap, in a case with gaps=1: one after each sequence, one at
  // the end.
  int64_t tokens(int padded, int64_t extent) const {
    return given(p_, padded) ? std::max<int64_t>(extent - s_.batch - 1, 0) : extent;
  }

  // The padded length of a case that has as many tokens as this side.
  int64_t longest(bool packed, uint32_t flag, int64_t max_seqlen, int64_t tokens) const {
    if (!packed) return tokens;
    const int64_t mean = s_.batch > 0 ? (tokens + s_.batch - 1) / s_.batch : tokens;
    return has(p_, flag) ? std::max(max_seqlen, mean) : mean;
  }

  void sizes() {
    const int64_t sq = longest(is_thd_q(p_), TESSERA_MAX_SEQLEN_Q, p_.max_seqlen_q, tokens_q_);
    const int64_t sk = longest(is_thd_k(p_), TESSERA_MAX_SEQLEN_K, p_.max_seqlen_k, tokens_k_);
    number("b", s_.batch);
    pair("s", "sq", "sk", sq, sk);
    pair("h", "hq", "hk", s_.hq, s_.hk);
    pair("d", "dqk", "dv", s_.dqk, s_.dv);
    if (dtype(TESSERA_K) != dtype(TESSERA_Q))
      word("kv=" + std::string(dtype_name(dtype(TESSERA_K))));
    lengths(sq, sk);
  }

  // Lengths of a packed side that add up to its tokens, or a seed where they cannot be listed.
  std::string packed_lengths(int64_t tokens, int64_t longest) const {
    if (s_.batch == 0) return "full";
    if (tokens % s_.batch == 0 && tokens / s_.batch == longest) return "full";
    if (s_.batch > kListedLengths) return "random:0";
    std::string list;
    for (int64_t n = 0; n < s_.batch; ++n) {
      list += (n ? "," : "") + std::to_string(tokens / s_.batch + (n < tokens % s_.batch));
    }
    return list;
  }

  void lengths(int64_t sq, int64_t sk) {
    std::string q = is_thd_q(p_)                   ? packed_lengths(tokens_q_, sq)
                    : given(p_, TESSERA_SEQLENS_Q) ? "random:0"
                                                   : "full";
    std::string k = is_thd_k(p_) ? packed_lengths(tokens_k_, sk)
                    : given(p_, TESSERA_SEQLENS_K)
                        ? (given(p_, TESSERA_SEQLENS_Q) ? "random:1" : "random:0")
                        : "full";
    if (has(p_, TESSERA_SAME_LENGTHS)) {
      word("lens=" + q);
    } else {
      if (q != "full") word("lens_q=" + q);
      if (k != "full") word("lens_k=" + k);
    }
    if (given(p_, TESSERA_CU_SEQLENS_Q_PADDED) || given(p_, TESSERA_CU_SEQLENS_K_PADDED)) {
      number("gaps", 1);
    }
    if (is_paged(p_)) number("page", p_.tensor[TESSERA_K].extent[1]);
    if (given(p_, TESSERA_PAGE_TABLE_V)) number("tables", 2);
    for (const int i :
         {TESSERA_SEQLENS_Q, TESSERA_SEQLENS_K, TESSERA_CU_SEQLENS_Q, TESSERA_CU_SEQLENS_K}) {
      if (dtype(i) == TESSERA_INT64) return word("int64");
    }
  }

  void layout() {
    const std::string q = kFormats[p_.format_q], kv = kFormats[p_.format_kv];
    if (is_paged(p_) || q == kv) {
      if (q != "bshd") word("layout=" + q);
    } else {
      word("layout=" + q + "," + kv);
    }
    if (!dense(TESSERA_Q) || !dense(TESSERA_K) || !dense(TESSERA_V)) word("strided");
  }

  // True if the tensor has no slack between its rows.
  bool dense(int index) const {
    const Tensor& t = p_.tensor[index];
    if (element_count(t, tensor_rule(index).rank) == 0) return true;
    const AxisOrder order = caller_order(p_, index);
    int64_t expected = 1;
    for (int i = order.count - 1; i >= 0; --i) {
      const int axis = order.axis[i];
      if (t.extent[axis] > 1 && t.stride[axis] != expected) return false;
      expected *= t.extent[axis];
    }
    return true;
  }

  void band() {
    const int64_t left = has(p_, TESSERA_WINDOW) ? p_.window_left : -1;
    const int64_t right = has(p_, TESSERA_WINDOW) ? p_.window_right : -1;
    if (has(p_, TESSERA_CAUSAL) || (left < 0 && right == 0)) word("causal");
    if (left >= 0 || right > 0) {
      word("window=" + std::to_string(left) + "," + std::to_string(right));
    }
    if (given(p_, TESSERA_WINDOWS)) word("windows=random:0");
    if (p_.align == TESSERA_ALIGN_GIVEN) {
      word(given(p_, TESSERA_SHIFT) ? "shift=random:0" : "shift=" + std::to_string(p_.shift));
    }
    if (given(p_, TESSERA_Q_START)) word("q_start=random:0");
    if (given(p_, TESSERA_K_START)) word("k_start=random:1");
    if (lengths_known_equal(p_)) return;
    if (p_.align == TESSERA_ALIGN_TOP_LEFT) word("align=top_left");
    if (p_.align == TESSERA_ALIGN_BOTTOM_RIGHT) word("align=bottom_right");
  }

  // The letters of the axes that are not broadcast.
  std::string axes(int index) const {
    std::string letters;
    for (int axis = 0; axis < 4; ++axis) {
      if (p_.tensor[index].extent[axis] != 1) letters += "bhqk"[axis];
    }
    return letters.empty() ? "k" : letters;
  }

  void mask() {
    if (given(p_, TESSERA_MASK))
      word(name_of(p_, TESSERA_MASK) + ("=random:0.5/" + axes(TESSERA_MASK)));
    if (given(p_, TESSERA_KEY_RANGES)) {
      word(p_.tensor[TESSERA_KEY_RANGES].extent[3] == 4 ? "ranges=two:0" : "ranges=random:0");
    }
    if (given(p_, TESSERA_SEGMENT_IDS_Q)) word("segments=2");
  }

  void score() {
    if (has(p_, TESSERA_SOFTCAP)) word("softcap=30");
    if (given(p_, TESSERA_BIAS)) {
      word((has(p_, TESSERA_BIAS_PRE_SCALE) ? "bias=pre/" : "bias=post/") + axes(TESSERA_BIAS));
      if (dtype(TESSERA_BIAS) == TESSERA_FP32 && dtype(TESSERA_Q) != TESSERA_FP32) {
        word("bias_dtype=fp32");
      }
    }
    if (given(p_, TESSERA_ALIBI_SLOPES)) {
      word(p_.tensor[TESSERA_ALIBI_SLOPES].extent[0] == 1 ? "alibi" : "alibi=bh");
    }
    if (has(p_, TESSERA_SINK_OFF_BY_ONE)) word("sink=off_by_one");
    if (given(p_, TESSERA_SINK)) word("sink=learnable");
  }

  void other() {
    if (has(p_, TESSERA_DROPOUT)) word("dropout=0.1");
    if (has(p_, TESSERA_DROPOUT) && p_.tensor[TESSERA_RNG_STATE].extent[0] == 4) {
      word("rng=0," + std::to_string(s_.hq));
    }
    shown(Token::kWhat);
    rounding();
    if (given(p_, TESSERA_DLSE)) word("dlse");
    std::string gradients;
    for (const int i : {TESSERA_DBIAS, TESSERA_DSINK, TESSERA_DALIBI_SLOPES}) {
      if (given(p_, i))
        gradients += (gradients.empty() ? "" : ",") + std::string(tensor_rule(i).name);
    }
    if (!gradients.empty()) word("grads=" + gradients);
    if (given(p_, TESSERA_MAX_LOGIT)) word("max_logit");
    shown(Token::kHow);
  }

  // The tokens that are in the problem as they are.
  void shown(Token::Part part) {
    for (const Token& token : tessera::tokens()) {
      std::string value;
      if (token.part != part || token.show == nullptr || !token.show(p_, value)) continue;
      word(std::string(token.key) + (value.empty() ? "" : "=" + value));
    }
  }

  // How scales are shared, as nearly as a case can say.
  std::string sharing(int index, const char* fine) const {
    const Tensor& t = p_.tensor[index];
    return t.extent[2] > 1 ? fine : t.extent[0] > 1 || t.extent[1] > 1 ? "head" : "one";
  }

  void rounding() {
    const int q_scale = given(p_, TESSERA_Q_SCALE) ? TESSERA_Q_SCALE : TESSERA_DO_SCALE;
    if (given(p_, q_scale)) word("qscale=" + sharing(q_scale, "row"));
    for (const int i : {TESSERA_K_SCALE, TESSERA_V_SCALE}) {
      // One scale for each head is what a case with fp8 keys has anyway.
      if (!given(p_, i) || sharing(i, "block") == "head") continue;
      word("kvscale=" + sharing(i, "block"));
      break;
    }
    const auto unusual = [&](const char* key, int index) {
      if (!given(p_, index) || dtype(index) == usual_dtype(p_, index)) return;
      word(key + std::string(dtype_name(dtype(index))));
    };
    unusual("do=", TESSERA_DO);
    unusual("o=", TESSERA_O);
    unusual("grad=", TESSERA_DQ);
    if (given(p_, TESSERA_AMAX_O) || given(p_, TESSERA_AMAX_DQ)) word("amax");
    if (!has(p_, TESSERA_FP8_PRODUCTS)) return;
    word("precision=fp8");
    if (!has(p_, TESSERA_SMOOTH_MEAN)) word("smooth=none");
    if (has(p_, TESSERA_SMOOTH_MEAN) && !has(p_, TESSERA_SMOOTH_HADAMARD)) word("smooth=mean");
  }

  const Problem& p_;
  const Sizes s_;
  const int64_t tokens_q_ = tokens(TESSERA_CU_SEQLENS_Q_PADDED, s_.sq);
  const int64_t tokens_k_ = tokens(TESSERA_CU_SEQLENS_K_PADDED, s_.sk);
  std::string line_;
};

}  // namespace

AxisOrder caller_order(const Problem& p, int index) {
  const bool paged_kv = is_paged(p) && (index == TESSERA_K || index == TESSERA_V ||
                                        index == TESSERA_DK || index == TESSERA_DV);
  const bool key_side = index == TESSERA_K || index == TESSERA_V || index == TESSERA_DK ||
                        index == TESSERA_DV || index == TESSERA_SEGMENT_IDS_K;
  const bool packed = key_side ? is_thd_k(p) : is_thd_q(p);
  switch (index) {
    case TESSERA_Q:
    case TESSERA_O:
    case TESSERA_DO:
    case TESSERA_DQ:
    case TESSERA_K:
    case TESSERA_V:
    case TESSERA_DK:
    case TESSERA_DV:
      if (paged_kv) return {4, {0, 1, 2, 3}};
      switch (key_side ? p.format_kv : p.format_q) {
        case TESSERA_SBHD:
          return {4, {1, 0, 2, 3}};
        case TESSERA_BHSD:
          return {4, {0, 2, 1, 3}};
        case TESSERA_THD:
          return {3, {1, 2, 3, 0}};
      }
      return {4, {0, 1, 2, 3}};
    case TESSERA_LSE:
    case TESSERA_DLSE:
      if (packed) return {2, {1, 2, 0, 0}};
      return {3, {0, 1, 2, 0}};
    case TESSERA_KEY_RANGES:
      if (packed) return {3, {1, 2, 3, 0}};
      return {4, {0, 1, 2, 3}};
    case TESSERA_SEGMENT_IDS_Q:
    case TESSERA_SEGMENT_IDS_K:
      if (packed) return {1, {1, 0, 0, 0}};
      return {2, {0, 1, 0, 0}};
  }
  return {tensor_rule(index).rank, {0, 1, 2, 3}};
}

std::string shape_text(const Problem& p, int index) {
  const AxisOrder order = caller_order(p, index);
  std::string text = "[";
  for (int i = 0; i < order.count; ++i) {
    text += (i ? ", " : "") + std::to_string(p.tensor[index].extent[order.axis[i]]);
  }
  return text + "]";
}

std::string to_case(const Problem& problem) { return CaseLine(problem).text(); }

}  // namespace tessera
