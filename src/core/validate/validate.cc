// SPDX-License-Identifier: Apache-2.0
// validate(problem): which fields may be given together. Shapes and dtypes are in
// validate/tensors.cc, pointers and values in validate/buffers.cc.
#include "core/validate/validate.h"

#include <cinttypes>

#include "core/mask/sequence.h"
#include "core/problem/fields.h"
#include "core/problem/problem.h"
#include "core/validate/partners.h"
#include "core/validate/shapes.h"

namespace tessera {
namespace {

constexpr uint32_t kKnownFlags = known_flags();

Status check_pass(const Problem& p) {
  for (const int i : {TESSERA_Q, TESSERA_K, TESSERA_V}) {
    TESSERA_RETURN_IF_ERROR(check_required(p, i, "attention is a function of q, k and v"));
  }
  if (!is_backward(p)) {
    TESSERA_RETURN_IF_ERROR(check_required(p, TESSERA_O, "the forward pass writes it"));
    for (int i = 0; i < TESSERA_NUM_TENSORS; ++i) {
      const Role role = tensor_rule(i).role;
      if (role == Role::kBackwardInput || role == Role::kBackwardOutput) {
        TESSERA_RETURN_IF_ERROR(check_excluded(p, i, "it belongs to the backward pass"));
      }
    }
    return {};
  }
  for (const int i : {TESSERA_O, TESSERA_LSE, TESSERA_DO}) {
    TESSERA_RETURN_IF_ERROR(check_required(p, i, "the backward pass reads it"));
  }
  TESSERA_RETURN_IF_ERROR(
      check_excluded(p, TESSERA_MAX_LOGIT, "max_logit is an output of the forward pass only"));
  TESSERA_RETURN_IF_ERROR(
      check_excluded(p, TESSERA_AMAX_O, "amax_o is an output of the forward pass only"));
  TESSERA_RETURN_IF_ERROR(check_partner(p, TESSERA_DBIAS, TESSERA_BIAS));
  TESSERA_RETURN_IF_ERROR(check_partner(p, TESSERA_DALIBI_SLOPES, TESSERA_ALIBI_SLOPES));
  return check_partner(p, TESSERA_DSINK, TESSERA_SINK);
}

// How the lengths of one side are given.
struct LengthSide {
  const char* tensor;
  int seqlens, cu_seqlens, padded;
  uint32_t max_flag;
  const char* max_name;
};

Status check_lengths(const Problem& p, const LengthSide& side, bool thd, int64_t max_seqlen) {
  const char* name = name_of(p, side.cu_seqlens);
  if (thd) {
    if (given(p, side.seqlens)) {
      return invalid(
          "%s.shape=%s: %s is packed (thd), whose lengths are given by %s; pass %s "
          "instead",
          name_of(p, side.seqlens), shape_text(p, side.seqlens).c_str(), side.tensor, name, name);
    }
    if (!given(p, side.cu_seqlens)) {
      return invalid(
          "%s=None: must be given, because %s is packed (thd); pass int32 or int64 "
          "offsets of shape [b + 1]",
          name, side.tensor);
    }
  } else if (given(p, side.cu_seqlens)) {
    return invalid(
        "%s.shape=%s: %s is not packed (thd), so its lengths are given by %s; pass "
        "%s, or layout=\"thd\"",
        name, shape_text(p, side.cu_seqlens).c_str(), side.tensor, name_of(p, side.seqlens),
        name_of(p, side.seqlens));
  }
  TESSERA_RETURN_IF_ERROR(check_partner(p, side.padded, side.cu_seqlens));
  TESSERA_RETURN_IF_ERROR(
      check_flag_partner(p, side.max_flag, side.max_name, max_seqlen, side.cu_seqlens));
  if (has(p, side.max_flag) && max_seqlen < 0) {
    return invalid("%s=%" PRId64 ": must be at least the longest sequence, never negative",
                   side.max_name, max_seqlen);
  }
  return {};
}

Status check_all_lengths(const Problem& p) {
  TESSERA_RETURN_IF_ERROR(
      check_lengths(p,
                    {"q", TESSERA_SEQLENS_Q, TESSERA_CU_SEQLENS_Q, TESSERA_CU_SEQLENS_Q_PADDED,
                     TESSERA_MAX_SEQLEN_Q, "max_seqlen_q"},
                    is_thd_q(p), p.max_seqlen_q));
  TESSERA_RETURN_IF_ERROR(
      check_lengths(p,
                    {"k", TESSERA_SEQLENS_K, TESSERA_CU_SEQLENS_K, TESSERA_CU_SEQLENS_K_PADDED,
                     TESSERA_MAX_SEQLEN_K, "max_seqlen_k"},
                    is_thd_k(p), p.max_seqlen_k));
  if (is_paged(p) && !given(p, TESSERA_SEQLENS_K)) {
    return invalid(
        "seqlens_k=None: must be given, because k and v are paged; pass int32 or int64 "
        "lengths of shape [b]");
  }
  if (!has(p, TESSERA_SAME_LENGTHS)) return {};
  const bool padded = given(p, TESSERA_SEQLENS_Q) && given(p, TESSERA_SEQLENS_K);
  const bool packed = given(p, TESSERA_CU_SEQLENS_Q) && given(p, TESSERA_CU_SEQLENS_K);
  if (!padded && !packed) {
    return invalid(
        "TESSERA_SAME_LENGTHS: needs one kind of lengths on both sides; give seqlens_q "
        "and seqlens_k, or cu_seqlens_q and cu_seqlens_k, as the same array");
  }
  const int q = padded ? TESSERA_SEQLENS_Q : TESSERA_CU_SEQLENS_Q;
  const int k = padded ? TESSERA_SEQLENS_K : TESSERA_CU_SEQLENS_K;
  const Tensor &a = p.tensor[q], &b = p.tensor[k];
  if (a.dtype != b.dtype || a.extent[0] != b.extent[0] ||
      (a.extent[0] > 1 && a.stride[0] != b.stride[0])) {
    return invalid(
        "TESSERA_SAME_LENGTHS: %s and %s must be one array, with equal dtype, shape and "
        "stride; clear the flag for two arrays",
        name_of(p, q), name_of(p, k));
  }
  return {};
}

Status check_together(const Problem& p) {
  TESSERA_RETURN_IF_ERROR(check_partner(p, TESSERA_PAGE_TABLE_V, TESSERA_PAGE_TABLE_K));
  if (given(p, TESSERA_MASK) && given(p, TESSERA_KEY_RANGES)) {
    return invalid(
        "%s.shape=%s: at most one data mask, and key_ranges is given too; combine them "
        "into one",
        name_of(p, TESSERA_MASK), shape_text(p, TESSERA_MASK).c_str());
  }
  if (has(p, TESSERA_MASK_DROP) && !given(p, TESSERA_MASK)) {
    return invalid("TESSERA_MASK_DROP: needs the mask, which is not given; clear the flag");
  }
  TESSERA_RETURN_IF_ERROR(check_partner(p, TESSERA_SEGMENT_IDS_Q, TESSERA_SEGMENT_IDS_K));
  TESSERA_RETURN_IF_ERROR(check_partner(p, TESSERA_SEGMENT_IDS_K, TESSERA_SEGMENT_IDS_Q));
  if (given(p, TESSERA_SINK) && has(p, TESSERA_SINK_OFF_BY_ONE)) {
    return invalid("sink.shape=%s: the off-by-one sink excludes a learnable one; give one of them",
                   shape_text(p, TESSERA_SINK).c_str());
  }
  if (has(p, TESSERA_DROPOUT) && !given(p, TESSERA_RNG_STATE)) {
    return invalid("rng_state=None: must be given with dropout_p > 0; pass int64 (seed, offset)");
  }
  if (has(p, TESSERA_BATCH_INVARIANT) && is_backward(p)) {
    return invalid("batch_invariant=True: is a mode of the forward pass; leave it out here");
  }
  if (has(p, TESSERA_BATCH_INVARIANT) && has(p, TESSERA_DROPOUT)) {
    return invalid(
        "batch_invariant=True: excludes dropout, whose mask depends on the sequence's "
        "place in the batch; leave one of them out");
  }
  return {};
}

Status check_band(const Problem& p) {
  if (has(p, TESSERA_WINDOW)) {
    const auto window = [&p](const char* rule) {
      return invalid("window=(%" PRId64 ", %" PRId64 "): %s", p.window_left, p.window_right, rule);
    };
    if (p.window_left < -1 || p.window_right < -1) {
      return window("each side must be -1 (unbounded) or >= 0");
    }
    if (has(p, TESSERA_CAUSAL) && p.window_right > 0) {
      return window(
          "causal=True means right = 0, so right must be 0 or -1; leave causal out to "
          "see keys to the right");
    }
  }
  const bool alibi = given(p, TESSERA_ALIBI_SLOPES);
  if (p.align == TESSERA_ALIGN_NONE && (has_band(p) || alibi) && !lengths_known_equal(p)) {
    return invalid(
        "align=None: must be given, because %s has a diagonal and the lengths of q and k are not "
        "known to be equal%s (q.shape=%s, k.shape=%s); pass align=\"top_left\" or "
        "align=\"bottom_right\"%s",
        has(p, TESSERA_CAUSAL)                  ? "causal=True"
        : has(p, TESSERA_WINDOW) && has_band(p) ? "the window"
        : given(p, TESSERA_WINDOWS)             ? "windows"
        : alibi                                 ? "alibi_slopes"
                                                : "the mask",
        given(p, TESSERA_Q_START) || given(p, TESSERA_K_START) ? ", nor where they begin" : "",
        shape_text(p, TESSERA_Q).c_str(), shape_text(p, TESSERA_K).c_str(), layout_hint(p));
  }
  return {};
}

}  // namespace

Status validate_fields(const Problem& p) {
  if (p.pass != TESSERA_FORWARD && p.pass != TESSERA_BACKWARD) {
    return invalid("pass=%d: must be TESSERA_FORWARD (0) or TESSERA_BACKWARD (1)", p.pass);
  }
  if (p.format_q < TESSERA_BSHD || p.format_q > TESSERA_THD) {
    return invalid("layout=%d: the format of q must be bshd (0), sbhd (1), bhsd (2) or thd (3)",
                   p.format_q);
  }
  if (!is_paged(p) && (p.format_kv < TESSERA_BSHD || p.format_kv > TESSERA_THD)) {
    return invalid(
        "layout=%d: the format of k and v must be bshd (0), sbhd (1), bhsd (2) or thd (3)",
        p.format_kv);
  }
  if (p.align < TESSERA_ALIGN_NONE || p.align > TESSERA_ALIGN_GIVEN) {
    return invalid(
        "align=%d: must be top_left (1), bottom_right (2) or given (3), or 0 when not given",
        p.align);
  }
  TESSERA_RETURN_IF_ERROR(check_flags(p.flags, kKnownFlags));
  TESSERA_RETURN_IF_ERROR(check_reserved("problem.reserved", p.reserved));
  for (int i = 0; i < TESSERA_NUM_TENSORS; ++i) {
    const Tensor& t = p.tensor[i];
    if (t.dtype < TESSERA_NONE || t.dtype > TESSERA_INT64) {
      return invalid("%s.dtype=%d: must be a tessera_dtype; 0 means not given", name_of(p, i),
                     t.dtype);
    }
    if (t.dtype != TESSERA_NONE) TESSERA_RETURN_IF_ERROR(check_tensor_field(name_of(p, i), t));
  }
  return {};
}

Status check_flags(uint32_t flags, uint32_t known) {
  if ((flags & ~known) == 0) return {};
  return invalid("flags=0x%x: bits 0x%x have no meaning in this version; leave them 0", flags,
                 flags & ~known);
}

Status check_reserved(const char* name, std::span<const int64_t> fields) {
  for (const int64_t field : fields) {
    if (field == 0) continue;
    return invalid("%s=%" PRId64 ": must be 0; zero the struct before filling it", name, field);
  }
  return {};
}

Status check_tensor_field(const char* name, const Tensor& t) {
  if (t.reserved == 0) return {};
  return invalid("%s.reserved=%d: must be 0; zero the struct before filling it", name, t.reserved);
}

Status validate(const Problem& problem) {
  TESSERA_RETURN_IF_ERROR(validate_fields(problem));
  TESSERA_RETURN_IF_ERROR(check_pass(problem));
  TESSERA_RETURN_IF_ERROR(check_all_lengths(problem));
  TESSERA_RETURN_IF_ERROR(check_together(problem));
  TESSERA_RETURN_IF_ERROR(validate_positions(problem));
  TESSERA_RETURN_IF_ERROR(validate_rounding(problem));
  TESSERA_RETURN_IF_ERROR(validate_tensors(problem));
  return check_band(problem);
}

}  // namespace tessera
