// SPDX-License-Identifier: Apache-2.0
// What joins several keys of a case: sizes that must be there, lengths that must fit, layouts that
// some sizes cannot have.
#include <algorithm>
#include <utility>

#include "core/case.h"

namespace tessera {

Status check_case(const Case& c) {
  using Kind = CaseLengths::Kind;
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
  const auto fits = [&](const char* name, const CaseLengths& lens, int64_t s) -> Status {
    if (lens.kind != Kind::kList) return {};
    if (static_cast<int64_t>(lens.list.size()) != c.b) {
      return invalid("case token '%s': lists %zu lengths, b=%lld; one length for each sequence",
                     name, lens.list.size(), static_cast<long long>(c.b));
    }
    for (int64_t n : lens.list) {
      if (n > s)
        return invalid("case token '%s': %lld exceeds the extent %lld; lengths in 0..%lld", name,
                       static_cast<long long>(n), static_cast<long long>(s),
                       static_cast<long long>(s));
    }
    return {};
  };
  TESSERA_RETURN_IF_ERROR(fits("lens", c.lens, std::min(c.sq, c.sk)));
  TESSERA_RETURN_IF_ERROR(fits("lens_q", c.lens_q, c.sq));
  TESSERA_RETURN_IF_ERROR(fits("lens_k", c.lens_k, c.sk));
  const bool paged = c.page > 0, thd_q = c.layout.format_q == TESSERA_THD;
  const bool thd_k = !paged && c.layout.format_kv == TESSERA_THD;
  const bool te_paged = c.layout.name.starts_with("paged_kv_");
  if (te_paged && !paged)
    return invalid("case token 'layout=%s': needs pages; add page=N", c.layout.name.c_str());
  if (c.tables == 2 && !paged) return invalid("case token 'tables=2': needs pages; add page=N");
  if (c.gaps.kind != CaseGaps::Kind::kNone && !thd_q && !thd_k) {
    return invalid("case token 'gaps': needs packed sequences; layout=thd");
  }
  if (c.gaps.kind == CaseGaps::Kind::kFixed && c.gaps.value > 1024 * 1024) {
    return invalid("case token 'gaps=%lld': at most 2^20 tokens",
                   static_cast<long long>(c.gaps.value));
  }
  const bool packed = c.layout.packing != CaseLayout::Packing::kSeparate;
  const bool all = c.interleaved || c.layout.packing == CaseLayout::Packing::kQkvBeforeHeads ||
                   c.layout.packing == CaseLayout::Packing::kQkvAfterHeads;
  if (packed && c.interleaved) {
    return invalid("case token 'interleaved': layout=%s already says it; remove one",
                   c.layout.name.c_str());
  }
  if ((packed || c.interleaved) && (paged || (c.kv_dtype != TESSERA_NONE && all))) {
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
  if (all && (c.sq != c.sk || c.layout.format_q != c.layout.format_kv ||
              (thd_q && (c.lens_q.kind != Kind::kAbsent || c.lens_k.kind != Kind::kAbsent)))) {
    return invalid(
        "case: q, k and v of one buffer share their tokens; one format, s=N and lens=LIST");
  }
  if (c.bias_inf > 0 && c.bias == Case::BiasAt::kNone) {
    return invalid("case token 'bias_inf': needs a bias; add bias=post");
  }
  if (c.expanded && (packed || c.interleaved)) {
    return invalid(
        "case token 'expanded': parts of one buffer have strides of their own; separate buffers");
  }
  if (c.bias_dtype != TESSERA_NONE && c.bias == Case::BiasAt::kNone &&
      c.alibi == Case::Alibi::kNone && c.sink != Case::Sink::kLearnable) {
    return invalid("case token 'bias_dtype=fp32': needs a bias, alibi or sink=learnable");
  }
  if (c.pass == TESSERA_FORWARD && (c.dlse || c.dbias || c.dsink || c.dalibi_slopes)) {
    return invalid("case token '%s': belongs to the backward pass; bwd", c.dlse ? "dlse" : "grads");
  }
  if (c.pass == TESSERA_BACKWARD && c.max_logit) {
    return invalid("case token 'max_logit': belongs to the forward pass; fwd");
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

}  // namespace tessera
