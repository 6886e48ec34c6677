// SPDX-License-Identifier: Apache-2.0
#include "core/validate/partners.h"

#include "core/validate/values.h"

namespace tessera {
namespace {

// Scales and largest values belong to a tensor of fp8.
Status check_scales(const Problem& p) {
  constexpr int kScaled[][2] = {{TESSERA_K_SCALE, TESSERA_K},   {TESSERA_V_SCALE, TESSERA_V},
                                {TESSERA_Q_SCALE, TESSERA_Q},   {TESSERA_DO_SCALE, TESSERA_DO},
                                {TESSERA_O_SCALE, TESSERA_O},   {TESSERA_DQ_SCALE, TESSERA_DQ},
                                {TESSERA_DK_SCALE, TESSERA_DK}, {TESSERA_DV_SCALE, TESSERA_DV}};
  for (const auto& [scale, tensor] : kScaled) {
    if (!given(p, scale) || is_fp8(p.tensor[tensor].dtype)) continue;
    const int32_t dtype = p.tensor[tensor].dtype;
    return invalid("%s.shape=%s: scales an fp8 %s, but %s.dtype=%s; leave it out, or quantise %s",
                   name_of(p, scale), shape_text(p, scale).c_str(), name_of(p, tensor),
                   name_of(p, tensor), dtype == TESSERA_NONE ? "None" : dtype_name(dtype).data(),
                   name_of(p, tensor));
  }
  constexpr int kLargest[][2] = {{TESSERA_AMAX_O, TESSERA_O},
                                 {TESSERA_AMAX_DQ, TESSERA_DQ},
                                 {TESSERA_AMAX_DK, TESSERA_DK},
                                 {TESSERA_AMAX_DV, TESSERA_DV}};
  const bool fp8 = is_fp8(p.tensor[TESSERA_Q].dtype) || has(p, TESSERA_FP8_PRODUCTS);
  for (const auto& [largest, tensor] : kLargest) {
    TESSERA_RETURN_IF_ERROR(check_partner(p, largest, tensor));
    if (given(p, largest) && !fp8) {
      return invalid("%s.shape=%s: belongs to fp8, and q.dtype=%s; leave it out",
                     name_of(p, largest), shape_text(p, largest).c_str(),
                     dtype_name(p.tensor[TESSERA_Q].dtype).data());
    }
  }
  return {};
}

Status check_blocks(const Problem& p) {
  const auto wrong = [](const char* side, int32_t block, const char* rule) {
    return invalid("scale_block=%d: that of %s must be %s; leave it 0 for one scale a sequence",
                   block, side, rule);
  };
  const int32_t q = p.q_scale_block, k = p.k_scale_block;
  if (q < 0 || (q > 1 && q % 64 != 0)) return wrong("q", q, "1 or a multiple of 64");
  if (k < 0 || k % 128 != 0) return wrong("k", k, "a multiple of 128");
  if (q > 0 && !given(p, TESSERA_Q_SCALE) && !given(p, TESSERA_DO_SCALE)) {
    return wrong("q", q, "beside q_scale or do_scale");
  }
  if (k > 0 && !given(p, TESSERA_K_SCALE) && !given(p, TESSERA_V_SCALE)) {
    return wrong("k", k, "beside k_scale or v_scale");
  }
  return {};
}

}  // namespace

Status validate_positions(const Problem& p) {
  if (p.align != TESSERA_ALIGN_GIVEN) {
    TESSERA_RETURN_IF_ERROR(
        check_excluded(p, TESSERA_SHIFT, "the diagonal is read with TESSERA_ALIGN_GIVEN only"));
    if (p.shift != 0) {
      return invalid("shift=%" PRId64 ": must be 0, as it is read with TESSERA_ALIGN_GIVEN only",
                     p.shift);
    }
  } else if (given(p, TESSERA_SHIFT) && p.shift != 0) {
    return invalid("shift=%" PRId64 ": must be 0 beside the SHIFT tensor; give one of them",
                   p.shift);
  } else if (p.shift < -kMostPosition || p.shift > kMostPosition) {
    return invalid("align=%" PRId64 ": a diagonal must be between -2^60 and 2^60", p.shift);
  }
  if (has(p, TESSERA_CAUSAL) || has(p, TESSERA_WINDOW)) {
    TESSERA_RETURN_IF_ERROR(check_excluded(
        p, TESSERA_WINDOWS,
        has(p, TESSERA_CAUSAL) ? "beside causal=True; a right side of 0 is what causal means"
                               : "beside window; it has both sides of each sequence"));
  }
  if (has(p, TESSERA_PARTIAL) && !is_backward(p)) {
    return invalid(
        "partial=True: says what o and lse of the backward pass belong to; leave it out here");
  }
  if (has(p, TESSERA_ACCUMULATE) && !is_backward(p) && !given(p, TESSERA_LSE)) {
    return invalid("accumulate=True: needs lse, by which parts are weighed; give it");
  }
  if (!has(p, TESSERA_V_IN_K)) return {};
  const Tensor &k = p.tensor[TESSERA_K], &v = p.tensor[TESSERA_V];
  bool same = k.dtype == v.dtype && v.extent[3] <= k.extent[3];
  for (int axis = 0; axis < 3; ++axis) {
    same = same && k.extent[axis] == v.extent[axis] &&
           (k.extent[axis] <= 1 || k.stride[axis] == v.stride[axis]);
  }
  if (same && !given(p, TESSERA_PAGE_TABLE_V)) return {};
  return invalid(
      "v.shape=%s: TESSERA_V_IN_K says that v is the first columns of k, with its dtype, "
      "extents, strides and pages; clear the flag for two tensors",
      shape_text(p, TESSERA_V).c_str());
}

Status validate_rounding(const Problem& p) {
  const bool products = has(p, TESSERA_FP8_PRODUCTS);
  const int32_t q = p.tensor[TESSERA_Q].dtype;
  if (products && !(is_16bit(q) && p.tensor[TESSERA_K].dtype == q)) {
    return invalid(
        "precision=\"fp8\": rounds 16-bit q, k and v, and q.dtype=%s, k.dtype=%s; leave "
        "it out, or pass bf16 or fp16",
        dtype_name(q).data(), dtype_name(p.tensor[TESSERA_K].dtype).data());
  }
  if (has(p, TESSERA_SMOOTH_MEAN | TESSERA_SMOOTH_HADAMARD) && !products) {
    return invalid("smooth: belongs to precision=\"fp8\", which is not given; leave it out");
  }
  if (has(p, TESSERA_SMOOTH_HADAMARD) && !has(p, TESSERA_SMOOTH_MEAN)) {
    return invalid(
        "smooth: TESSERA_SMOOTH_HADAMARD spreads the mean, so it needs "
        "TESSERA_SMOOTH_MEAN; give both");
  }
  TESSERA_RETURN_IF_ERROR(check_scales(p));
  return check_blocks(p);
}

}  // namespace tessera
