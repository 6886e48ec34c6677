// SPDX-License-Identifier: Apache-2.0
#include "core/validate/shapes.h"

#include "core/count.h"
#include "core/validate/validate.h"

namespace tessera {
namespace {

// Positions of a side inside its sequences.
int64_t positions(const Problem& p, bool packed, uint32_t flag, int64_t max_seqlen,
                  int64_t extent) {
  return !packed ? extent : has(p, flag) ? max_seqlen : kUnknown;
}

// Scales of the blocks of a sequence; without blocks one.
Axis scale_axis(int64_t extent, int32_t block, const char* name) {
  if (block <= 0) return {1, name};
  return {extent < 0 ? extent : Count{extent}.pieces(block).value(), name, true};
}

// k and v, where k says what v follows.
Shape shape_of_keys(const Problem& p, const Sizes& s, int index) {
  const bool is_k = index == TESSERA_K;
  const Axis rows = {is_k ? kFree : p.tensor[TESSERA_K].extent[1],
                     is_paged(p) ? "page_size" : "sk"},
             heads = {is_k ? kFree : s.hk, "hk"},
             columns = is_k ? Axis{s.dqk, "dqk"} : Axis{kFree, "dv"};
  if (is_paged(p)) return {{{kFree, "pages"}, rows, heads, columns}};
  return {{{is_thd_k(p) ? 1 : s.batch, "b"}, rows, heads, columns}};
}

// A gradient has the shape of its input.
Shape shape_of_input(const Problem& p, int gradient) {
  Shape shape{};
  for (int axis = 0; axis < 4; ++axis) {
    shape.axis[axis] = {p.tensor[tensor_like(gradient)].extent[axis], ""};
  }
  return shape;
}

}  // namespace

Shape expected_shape(const Problem& p, const Sizes& s, int index) {
  const int64_t batch_q = is_thd_q(p) ? 1 : s.batch, batch_k = is_thd_k(p) ? 1 : s.batch;
  const Axis batch_or_one{s.batch, "b", true}, heads_or_one{s.hq, "hq", true};
  const int64_t length_q = positions(p, is_thd_q(p), TESSERA_MAX_SEQLEN_Q, p.max_seqlen_q, s.sq);
  const int64_t length_k = positions(p, is_thd_k(p), TESSERA_MAX_SEQLEN_K, p.max_seqlen_k, s.sk);
  // The scale of a whole tensor and its largest value are one element each.
  if (TESSERA_O_SCALE <= index && index <= TESSERA_AMAX_DV) return {{{1, "1"}}};
  switch (index) {
    case TESSERA_Q:
    case TESSERA_DQ:
      return {{{batch_q, "b"}, {s.sq, "sq"}, {s.hq, "hq"}, {s.dqk, "dqk"}}};
    case TESSERA_K:
    case TESSERA_V:
      return shape_of_keys(p, s, index);
    case TESSERA_DK:
    case TESSERA_DV:
    case TESSERA_DBIAS:
    case TESSERA_DSINK:
    case TESSERA_DALIBI_SLOPES:
      return shape_of_input(p, index);
    case TESSERA_O:
    case TESSERA_DO:
      return {{{batch_q, "b"}, {s.sq, "sq"}, {s.hq, "hq"}, {s.dv, "dv"}}};
    case TESSERA_LSE:
    case TESSERA_DLSE:
      return {{{batch_q, "b"}, {s.hq, "hq"}, {s.sq, "sq"}}};
    case TESSERA_BIAS:
    case TESSERA_MASK:
      return {{batch_or_one,
               heads_or_one,
               {length_q, "max_seqlen_q", true},
               {length_k, "max_seqlen_k", true}}};
    case TESSERA_KEEP_TAIL:
      return {{batch_or_one, heads_or_one, {length_q, "max_seqlen_q"}, {length_q, "max_seqlen_q"}}};
    case TESSERA_KEY_RANGES:
      // The last axis is 2 or 4, which check_shape() looks at.
      return {{{batch_q, "b", !is_thd_q(p)}, heads_or_one, {s.sq, "sq", true}, {kFree, "2|4"}}};
    case TESSERA_SEGMENT_IDS_Q:
      return {{{batch_q, "b"}, {s.sq, "sq"}}};
    case TESSERA_SEGMENT_IDS_K:
      return {{{batch_k, "b"}, {s.sk, "sk"}}};
    case TESSERA_SINK:
    case TESSERA_MAX_LOGIT:
      return {{{s.hq, "hq"}}};
    case TESSERA_ALIBI_SLOPES:
      return {{batch_or_one, {s.hq, "hq"}}};
    case TESSERA_K_SCALE:
    case TESSERA_V_SCALE:
      return {{batch_or_one, {s.hk, "hk", true}, scale_axis(length_k, p.k_scale_block, "nk")}};
    case TESSERA_Q_SCALE:
    case TESSERA_DO_SCALE:
      return {{batch_or_one, heads_or_one, scale_axis(length_q, p.q_scale_block, "nq")}};
    case TESSERA_Q_START:
    case TESSERA_K_START:
    case TESSERA_SHIFT:
    case TESSERA_SEQLENS_Q:
    case TESSERA_SEQLENS_K:
      return {{{s.batch, "b"}}};
    case TESSERA_CU_SEQLENS_Q:
    case TESSERA_CU_SEQLENS_K:
    case TESSERA_CU_SEQLENS_Q_PADDED:
    case TESSERA_CU_SEQLENS_K_PADDED:
      return {{{s.batch + 1, "b + 1"}}};
    case TESSERA_WINDOWS:
      return {{{s.batch, "b"}, {2, "2"}}};
    case TESSERA_PAGE_TABLE_K:
      return {{{s.batch, "b"}, {kFree, "max_pages"}}};
    case TESSERA_PAGE_TABLE_V:
      return {{{s.batch, "b"}, {p.tensor[TESSERA_PAGE_TABLE_K].extent[1], "max_pages"}}};
    default:  // rng_state
      if (p.tensor[index].extent[0] == 4) return {{{4, "4"}}};
      return {{{2, "2"}}};  // says what is usual where it is neither
  }
}

const char* layout_hint(const Problem& p) {
  const Tensor &q = p.tensor[TESSERA_Q], &k = p.tensor[TESSERA_K];
  const bool fits = p.format_q == TESSERA_BSHD && p.format_kv == TESSERA_BSHD && !is_paged(p) &&
                    k.extent[1] > 0 && q.extent[1] % k.extent[1] == 0;
  return fits ? "; or layout=\"bhsd\", if the second axis is that of heads" : "";
}

}  // namespace tessera
