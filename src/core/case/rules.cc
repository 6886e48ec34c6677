// SPDX-License-Identifier: Apache-2.0
// What joins several keys of a case: sizes that must be there, lengths that must fit, layouts that
// some sizes cannot have.
#include <algorithm>
#include <utility>

#include "core/case/case.h"

namespace tessera {
namespace {

bool is_packed(const Case& c) { return c.layout.packing != CaseLayout::Packing::kSeparate; }

Status check_sizes(const Case& c) {
  const std::pair<const char*, int64_t> sizes[] = {{"b", c.b},   {"sq", c.sq}, {"sk", c.sk},
                                                   {"hq", c.hq}, {"hk", c.hk}, {"dqk", c.dqk},
                                                   {"dv", c.dv}};
  for (const auto& [name, value] : sizes) {
    if (value < 0) {
      return invalid(
          "case: %s is missing; give b, s (or sq and sk), h (or hq and hk), d (or dqk and dv)",
          name);
    }
  }
  const double q_side = 8.0 * c.b * (c.sq + 17.0) * c.hq * (c.dqk + c.dv + 8.0);
  const double k_side = 8.0 * c.b * (c.sk + 17.0 + c.page) * c.hk * (c.dqk + c.dv + 8.0);
  const double scores = 8.0 * c.b * c.hq * (c.sq + 17.0) * (c.sk + 17.0 + c.page);
  const bool dense = c.bias != Case::BiasAt::kNone || c.mask.what != CaseMask::What::kNone;
  if (q_side + k_side > 9e18 || (dense && scores > 9e18)) {
    return invalid(
        "case: b=%lld sq=%lld sk=%lld: a tensor may have at most 2^63 bytes; smaller sizes",
        static_cast<long long>(c.b), static_cast<long long>(c.sq), static_cast<long long>(c.sk));
  }
  return {};
}

// A list of numbers has one for each sequence, none above the most.
Status check_list(const Case& c, const char* name, const CaseLengths& lens, int64_t most) {
  if (lens.kind != CaseLengths::Kind::kList) return {};
  if (static_cast<int64_t>(lens.list.size()) != c.b) {
    return invalid("case token '%s': lists %zu lengths, b=%lld; one length for each sequence", name,
                   lens.list.size(), static_cast<long long>(c.b));
  }
  for (int64_t n : lens.list) {
    if (n > most)
      return invalid("case token '%s': %lld exceeds the extent %lld; lengths in 0..%lld", name,
                     static_cast<long long>(n), static_cast<long long>(most),
                     static_cast<long long>(most));
  }
  return {};
}

// What is drawn for each sequence is listed, so that no line of text fills the memory.
Status check_draws(const Case& c) {
  constexpr int64_t kMostDraws = int64_t{1} << 20;
  using Kind = CaseLengths::Kind;
  const std::pair<const char*, bool> drawn[] = {{"lens", c.lens.kind == Kind::kRandom},
                                                {"lens_q", c.lens_q.kind == Kind::kRandom},
                                                {"lens_k", c.lens_k.kind == Kind::kRandom},
                                                {"gaps", c.gaps.kind == CaseGaps::Kind::kRandom},
                                                {"q_start", c.q_start.kind == Kind::kRandom},
                                                {"k_start", c.k_start.kind == Kind::kRandom},
                                                {"shift", c.shift.kind == CaseShift::Kind::kRandom},
                                                {"windows", c.has_windows}};
  for (const auto& [name, is_drawn] : drawn) {
    if (is_drawn && c.b > kMostDraws) {
      return invalid("case token '%s=random': b=%lld; at most 2^20 sequences are drawn for", name,
                     static_cast<long long>(c.b));
    }
  }
  return {};
}

Status check_lists(const Case& c) {
  constexpr int64_t kMostPosition = int64_t{1} << 40;
  TESSERA_RETURN_IF_ERROR(check_list(c, "lens", c.lens, std::min(c.sq, c.sk)));
  TESSERA_RETURN_IF_ERROR(check_list(c, "q_start", c.q_start, kMostPosition));
  TESSERA_RETURN_IF_ERROR(check_list(c, "k_start", c.k_start, kMostPosition));
  TESSERA_RETURN_IF_ERROR(check_list(c, "lens_q", c.lens_q, c.sq));
  return check_list(c, "lens_k", c.lens_k, c.sk);
}

Status check_pages_and_gaps(const Case& c) {
  const bool paged = c.page > 0;
  const bool has_thd =
      c.layout.format_q == TESSERA_THD || (!paged && c.layout.format_kv == TESSERA_THD);
  if (c.layout.name.starts_with("paged_kv_") && !paged)
    return invalid("case token 'layout=%s': needs pages; add page=N", c.layout.name.c_str());
  if (c.tables == 2 && !paged) return invalid("case token 'tables=2': needs pages; add page=N");
  if (c.gaps.kind != CaseGaps::Kind::kNone && !has_thd) {
    return invalid("case token 'gaps': needs packed sequences; layout=thd");
  }
  if (c.gaps.kind == CaseGaps::Kind::kFixed && c.gaps.value > 1024 * 1024) {
    return invalid("case token 'gaps=%lld': at most 2^20 tokens",
                   static_cast<long long>(c.gaps.value));
  }
  return {};
}

// q, k and v in one buffer, by their layout or interleaved.
Status check_shared_buffer(const Case& c) {
  const bool packed = is_packed(c);
  const bool all = c.interleaved || c.layout.packing == CaseLayout::Packing::kQkvBeforeHeads ||
                   c.layout.packing == CaseLayout::Packing::kQkvAfterHeads;
  if (packed && c.interleaved) {
    return invalid("case token 'interleaved': layout=%s already says it; remove one",
                   c.layout.name.c_str());
  }
  if ((packed || c.interleaved) && (c.page > 0 || (c.kv_dtype != TESSERA_NONE && all))) {
    return invalid(
        "case: q, k and v of one buffer have one dtype and no pages; remove page and kv, or use "
        "separate buffers");
  }
  if (packed && (c.dqk != c.dv || (all && c.hq != c.hk))) {
    return invalid(
        "case token 'layout=%s': its parts have one number of heads and one head_dim; h=N d=N, or "
        "interleaved",
        c.layout.name.c_str());
  }
  const bool has_own_lengths =
      c.lens_q.kind != CaseLengths::Kind::kAbsent || c.lens_k.kind != CaseLengths::Kind::kAbsent;
  if (all && (c.sq != c.sk || c.layout.format_q != c.layout.format_kv ||
              (c.layout.format_q == TESSERA_THD && has_own_lengths))) {
    return invalid(
        "case: q, k and v of one buffer share their tokens; one format, s=N and lens=LIST");
  }
  return {};
}

// Rows and keys are low where the bias has them.
Status check_bias_low(const Case& c) {
  using Where = CaseBiasLow::Where;
  const Where where = c.bias_low.where;
  if (c.bias == Case::BiasAt::kNone) {
    return invalid("case token 'bias_low': needs a bias; add bias=post");
  }
  const auto has = [&](char axis) { return c.bias_shape.find(axis) != std::string::npos; };
  const bool of_rows = where == Where::kRows || where == Where::kCausal;
  const bool of_keys = where == Where::kKeys || where == Where::kFrom || where == Where::kCausal;
  if ((of_rows && !has('q')) || (of_keys && !has('k'))) {
    return invalid(
        "case token 'bias_low': rows need a bias with q, keys one with k, causal both; bias=post");
  }
  return {};
}

// Keys that mean something only beside others, or not beside others.
Status check_companions(const Case& c) {
  const bool one_buffer = is_packed(c) || c.interleaved;
  if (c.bias_inf > 0 && c.bias == Case::BiasAt::kNone) {
    return invalid("case token 'bias_inf': needs a bias; add bias=post");
  }
  if (c.bias_low.where != CaseBiasLow::Where::kNone) TESSERA_RETURN_IF_ERROR(check_bias_low(c));
  if (c.expanded && one_buffer) {
    return invalid(
        "case token 'expanded': parts of one buffer have strides of their own; separate buffers");
  }
  if (c.bias_dtype != TESSERA_NONE && c.bias == Case::BiasAt::kNone &&
      c.alibi == Case::Alibi::kNone && c.sink != Case::Sink::kLearnable) {
    return invalid("case token 'bias_dtype=fp32': needs a bias, alibi or sink=learnable");
  }
  if (c.has(TESSERA_V_IN_K) && (c.dv > c.dqk || one_buffer || c.expanded || c.tables == 2 ||
                                c.kv_scale != CaseScale::kNone)) {
    return invalid(
        "case token 'vink': v is the first columns of k; dv at most dqk, tables=1, without "
        "interleaved, expanded and kvscale");
  }
  if (c.has_smooth && !c.fp8_products) {
    return invalid("case token 'smooth': belongs to precision=fp8; add it");
  }
  if (c.four_words && c.dropout == 0) {
    return invalid("case token 'rng': needs dropout; add dropout=0.1");
  }
  return {};
}

Status check_pass(const Case& c) {
  const bool forward = c.pass == TESSERA_FORWARD;
  const std::pair<const char*, bool> of_backward[] = {
      {"partial", c.has(TESSERA_PARTIAL)},
      {"do", c.do_dtype != TESSERA_NONE},
      {"grad", c.grad_dtype != TESSERA_NONE},
      {"dlse", c.dlse},
      {"grads", c.dbias || c.dsink || c.dalibi_slopes}};
  for (const auto& [name, present] : of_backward) {
    if (forward && present) {
      return invalid("case token '%s': belongs to the backward pass; bwd", name);
    }
  }
  if (!forward && c.max_logit) {
    return invalid("case token 'max_logit': belongs to the forward pass; fwd");
  }
  if (c.no_lse && (!forward || c.has(TESSERA_ACCUMULATE))) {
    return invalid("case token 'no_lse': %s", forward ? "accumulate needs lse; leave it out"
                                                      : "belongs to the forward pass; fwd");
  }
  const std::pair<const char*, bool> orphans[] = {
      {"dbias: add bias=post", c.dbias && c.bias == Case::BiasAt::kNone},
      {"dsink: add sink=learnable", c.dsink && c.sink != Case::Sink::kLearnable},
      {"dalibi_slopes: add alibi", c.dalibi_slopes && c.alibi == Case::Alibi::kNone}};
  for (const auto& [text, broken] : orphans) {
    if (broken) return invalid("case token 'grads': a gradient needs its input, %s", text);
  }
  return {};
}

}  // namespace

Status check_case(const Case& c) {
  for (const auto check : {check_sizes, check_draws, check_lists, check_pages_and_gaps,
                           check_shared_buffer, check_companions, check_pass}) {
    TESSERA_RETURN_IF_ERROR(check(c));
  }
  return {};
}

}  // namespace tessera
