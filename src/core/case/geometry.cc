// SPDX-License-Identifier: Apache-2.0
// From a case to a problem: lengths, extents, and which tensors there are.
#include <algorithm>

#include "core/case/builder.h"
#include "core/case/draw.h"
#include "core/case/tokens.h"

namespace tessera {

CaseGeometry Builder::build() {
  backward_ = c_.pass == TESSERA_BACKWARD;
  paged_ = c_.page > 0;
  thd_q_ = c_.layout.format_q == TESSERA_THD;
  thd_k_ = !paged_ && c_.layout.format_kv == TESSERA_THD;
  statistic_ = c_.dtype == TESSERA_FP64 ? TESSERA_FP64 : TESSERA_FP32;
  Problem& p = g_.problem;
  p.struct_size = sizeof(Problem);
  p.pass = c_.pass;
  p.format_q = c_.layout.format_q;
  p.format_kv = paged_ ? TESSERA_BSHD : c_.layout.format_kv;
  for (const Token& token : tokens()) {
    if (token.put != nullptr) token.put(c_, g_);
  }
  resolve_lengths();
  resolve_positions();
  place_tokens();
  place_scores();
  place_lengths();
  place_positions();
  place_rounding();
  if (c_.expanded) expand_inputs();
  return std::move(g_);
}

// Draws of kDrawLengths: n for lens, lens_q; b + n for lens_k; 2b + n and 3b + n for the gaps after
// sequence n of q and k; 4b and 4b + 1 for the gaps before the first one.
void Builder::resolve_lengths() {
  using Kind = CaseLengths::Kind;
  const int64_t b = c_.b;
  const bool both = c_.lens.kind != Kind::kAbsent;
  const auto resolve = [&](const CaseLengths& lens, int64_t s, uint64_t first_draw) {
    if (lens.kind == Kind::kList) return PerSequence(lens.list);
    if (lens.kind != Kind::kRandom) return PerSequence::same(b, s);
    std::vector<int64_t> out(b);
    for (int64_t n = 0; n < b; ++n)
      out[n] = draw_integer(lens.seed, kDrawLengths, first_draw + n, s + 1);
    return PerSequence(std::move(out));
  };
  const int64_t shorter = std::min(c_.sq, c_.sk);
  if (both && c_.lens.kind != Kind::kFull) {
    g_.len_q = g_.len_k = resolve(c_.lens, shorter, 0);
  } else {
    g_.len_q = resolve(c_.lens_q, c_.sq, 0);
    g_.len_k = resolve(c_.lens_k, c_.sk, b);
  }
  // One array for both sides: lens=, or packed sequences that nothing tells apart.
  const bool apart = c_.lens_q.kind != Kind::kAbsent || c_.lens_k.kind != Kind::kAbsent;
  same_lengths_ = thd_q_ == thd_k_ && !apart && g_.len_q == g_.len_k &&
                  (thd_q_ || (both && c_.lens.kind != Kind::kFull));
  if (same_lengths_) g_.problem.flags |= TESSERA_SAME_LENGTHS;

  const auto starts = [&](const PerSequence& lens, int64_t side) {
    const bool random = c_.gaps.kind == CaseGaps::Kind::kRandom;
    if (!random && !lens.listed())
      return PerSequence::steps(b + 1, 0, lens.empty() ? 0 : lens[0] + c_.gaps.value);
    const auto gap = [&](uint64_t draw) {
      if (!random) return c_.gaps.value;
      return draw_integer(static_cast<uint32_t>(c_.gaps.value), kDrawLengths, draw, 17);
    };
    std::vector<int64_t> out(b + 1, 0);
    if (random) out[0] = gap(4 * b + side);
    for (int64_t n = 0; n < b; ++n) out[n + 1] = out[n] + lens[n] + gap((2 + side) * b + n);
    return PerSequence(std::move(out));
  };
  if (thd_q_) g_.start_q = starts(g_.len_q, 0);
  if (thd_k_) g_.start_k = starts(g_.len_k, same_lengths_ || c_.interleaved ? 0 : 1);

  // A packed buffer with gaps ends one token after the last sequence's gap.
  const int64_t tail = c_.gaps.kind == CaseGaps::Kind::kNone ? 0 : 1;
  batch_q_ = thd_q_ ? 1 : b;
  rows_q_ = thd_q_ ? (Count{g_.start_q[b]} + tail).value() : c_.sq;
  batch_k_ = thd_k_ ? 1 : b;
  rows_k_ = thd_k_ ? (Count{g_.start_k[b]} + tail).value() : c_.sk;
  if (paged_) max_pages_ = std::max<int64_t>(1, Count{c_.sk}.pieces(c_.page).value());
}

void Builder::place_tokens() {
  using Packing = CaseLayout::Packing;
  const Packing packing = c_.layout.packing;
  int32_t q_type = c_.dtype, k_type = c_.kv_dtype ? c_.kv_dtype : c_.dtype;
  const int32_t fq = c_.layout.format_q, fk = c_.layout.format_kv;
  const bool after = packing == Packing::kQkvAfterHeads || packing == Packing::kKvAfterHeads;
  const Join join = after ? Join::kAfterHeads : Join::kBeforeHeads;
  const bool qkv =
      c_.interleaved || packing == Packing::kQkvBeforeHeads || packing == Packing::kQkvAfterHeads;
  const bool kv = packing == Packing::kKvBeforeHeads || packing == Packing::kKvAfterHeads;
  const auto place = [&](int iq, int ik, int iv) {
    const Part q{iq, q_type, c_.hq, c_.dqk}, k{ik, k_type, c_.hk, c_.dqk},
        v{iv, k_type, c_.hk, c_.dv};
    if (qkv) return place_rows({q, k, v}, fq, batch_q_, rows_q_, join);
    place_rows({q}, fq, batch_q_, rows_q_, join);
    if (paged_) {
      // Every sequence has max_pages pages; three more (v: four) are never used.
      const Count pages = Count{c_.b} * max_pages_;
      place_pool(ik, k_type, (pages + 3).value(), c_.dqk);
      place_pool(iv, k_type, (pages + 4).value(), c_.dv);
    } else if (kv) {
      place_rows({k, v}, fk, batch_k_, rows_k_, join);
    } else {
      place_rows({k}, fk, batch_k_, rows_k_, join);
      place_rows({v}, fk, batch_k_, rows_k_, join);
    }
  };
  const auto type_of = [&](int32_t asked, int index) {
    return asked ? asked : usual_dtype(g_.problem, index);
  };
  place(TESSERA_Q, TESSERA_K, TESSERA_V);
  if (c_.has(TESSERA_V_IN_K)) {
    Tensor& v = g_.problem.tensor[TESSERA_V] = g_.problem.tensor[TESSERA_K];
    v.extent[3] = c_.dv;
    g_.owner[TESSERA_V] = TESSERA_K;
  }
  place_rows({{TESSERA_O, type_of(c_.o_dtype, TESSERA_O), c_.hq, c_.dv}}, fq, batch_q_, rows_q_,
             join);
  if (!c_.no_lse) place_row_statistics(TESSERA_LSE, !backward_);
  if (c_.max_logit) place_dense(TESSERA_MAX_LOGIT, statistic_, {c_.hq}, false);
  if (is_fp8(k_type)) {
    place_dense(TESSERA_K_SCALE, TESSERA_FP32, {1, c_.hk, 1}, false);
    place_dense(TESSERA_V_SCALE, TESSERA_FP32, {1, c_.hk, 1}, false);
  }
  if (!backward_) return;
  place_rows({{TESSERA_DO, type_of(c_.do_dtype, TESSERA_DO), c_.hq, c_.dv}}, fq, batch_q_, rows_q_,
             join);
  if (c_.dlse) place_row_statistics(TESSERA_DLSE, false);
  q_type = type_of(c_.grad_dtype, TESSERA_DQ);
  k_type = type_of(c_.grad_dtype, TESSERA_DK);
  place(TESSERA_DQ, TESSERA_DK, TESSERA_DV);
}

void Builder::place_scores() {
  const int32_t plain = is_fp8(c_.dtype) ? int32_t{TESSERA_FP32} : c_.dtype;
  const int32_t extra = c_.bias_dtype ? c_.bias_dtype : plain;
  const int64_t step = c_.strided ? 2 : 1;
  if (c_.bias != Case::BiasAt::kNone) place_broadcast(TESSERA_BIAS, extra, c_.bias_shape);
  if (c_.mask.what != CaseMask::What::kNone)
    place_broadcast(TESSERA_MASK, TESSERA_BOOL, c_.mask.shape);
  const bool dense = given(g_.problem, TESSERA_BIAS) || given(g_.problem, TESSERA_MASK);
  if ((dense || c_.longest) && thd_q_)
    g_.problem.flags |= TESSERA_MAX_SEQLEN_Q, g_.problem.max_seqlen_q = extent_q_;
  if ((dense || c_.longest) && thd_k_)
    g_.problem.flags |= TESSERA_MAX_SEQLEN_K, g_.problem.max_seqlen_k = extent_k_;
  switch (c_.ranges.kind) {  // random: of every head; two: of each head; prefix: of every sequence
    case CaseRanges::Kind::kNone:
      break;
    case CaseRanges::Kind::kRandom:
      place_dense(TESSERA_KEY_RANGES, TESSERA_INT32, {batch_q_, 1, rows_q_, 2}, true);
      break;
    case CaseRanges::Kind::kTwo:
      place_dense(TESSERA_KEY_RANGES, TESSERA_INT32, {batch_q_, c_.hq, rows_q_, 4}, true);
      break;
    case CaseRanges::Kind::kPrefix:
      place_dense(TESSERA_KEY_RANGES, TESSERA_INT32, {1, 1, rows_q_, 2}, true);
      break;
  }
  if (c_.segments.ids > 0) {
    place_dense(TESSERA_SEGMENT_IDS_Q, TESSERA_INT32, {batch_q_, rows_q_}, true, step);
    place_dense(TESSERA_SEGMENT_IDS_K, TESSERA_INT32,
                {thd_k_ ? 1 : c_.b, thd_k_ ? rows_k_ : extent_k_}, true, step);
  }
  if (c_.alibi != Case::Alibi::kNone) {
    const int64_t batch = c_.alibi == Case::Alibi::kPerBatchHead ? c_.b : 1;
    place_dense(TESSERA_ALIBI_SLOPES, extra, {batch, c_.hq}, true, step);
    if (c_.dalibi_slopes) place_dense(TESSERA_DALIBI_SLOPES, extra, {batch, c_.hq}, true, step);
  }
  if (c_.sink == Case::Sink::kLearnable) {
    place_dense(TESSERA_SINK, extra, {c_.hq}, true, step);
    if (c_.dsink) place_dense(TESSERA_DSINK, extra, {c_.hq}, true, step);
  }
  if (c_.dbias) {  // dense, whatever was expanded
    const Tensor& bias = g_.problem.tensor[TESSERA_BIAS];
    place_dense(TESSERA_DBIAS, extra,
                {bias.extent[0], bias.extent[1], bias.extent[2], bias.extent[3]}, true);
  }
  if (c_.dropout > 0) {
    place_dense(TESSERA_RNG_STATE, TESSERA_INT64, {c_.four_words ? 4 : 2}, false);
  }
}

void Builder::place_lengths() {
  using Kind = CaseLengths::Kind;
  const int32_t type = c_.int64_lengths ? TESSERA_INT64 : TESSERA_INT32;
  const int64_t step = c_.strided ? 2 : 1;
  const auto places = [](const CaseLengths& lens) {
    return lens.kind == Kind::kList || lens.kind == Kind::kRandom;
  };
  const auto place = [&](int first_q, int64_t count, bool q, bool k) {
    if (q) place_dense(first_q, type, {count}, true, step);
    if (k) place_dense(first_q + 1, type, {count}, true, step);
    // One array: both indices point to it.
    if (q && k && same_lengths_) g_.owner[first_q + 1] = first_q;
  };
  place(TESSERA_SEQLENS_Q, c_.b, !thd_q_ && (places(c_.lens) || places(c_.lens_q)),
        paged_ || (!thd_k_ && (places(c_.lens) || places(c_.lens_k))));
  place(TESSERA_CU_SEQLENS_Q, c_.b + 1, thd_q_, thd_k_);
  if (c_.gaps.kind != CaseGaps::Kind::kNone)
    place(TESSERA_CU_SEQLENS_Q_PADDED, c_.b + 1, thd_q_, thd_k_);
  if (paged_) {
    for (int index = TESSERA_PAGE_TABLE_K; index < TESSERA_PAGE_TABLE_K + c_.tables; ++index) {
      place_dense(index, TESSERA_INT32, {c_.b, max_pages_}, true, step);
    }
  }
}

CaseGeometry geometry_of(const Case& c) { return Builder(c).build(); }

Buffers scalars_of(const CaseGeometry& geometry) {
  Buffers buffers{};
  buffers.struct_size = sizeof buffers;
  buffers.softmax_scale = geometry.softmax_scale;
  buffers.softcap = geometry.softcap;
  buffers.dropout_p = geometry.dropout_p;
  return buffers;
}

}  // namespace tessera
