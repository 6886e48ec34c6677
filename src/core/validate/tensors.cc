// SPDX-License-Identifier: Apache-2.0
// validate(problem), tensor by tensor: one table-driven rule each for shape, size and strides.
#include <cinttypes>

#include "core/count.h"
#include "core/problem/problem.h"
#include "core/validate/overlap.h"
#include "core/validate/shapes.h"
#include "core/validate/validate.h"

namespace tessera {
namespace {

// The largest extent: roundings and sums of a few extents stay within 63 bits, and what they are
// multiplied to is a Count.
constexpr int64_t kMostExtent = int64_t{1} << 60;

// ---- shapes ----

std::string text_of(const Problem& p, const Shape& shape, int index) {
  const AxisOrder order = caller_order(p, index);
  std::string text = "[";
  for (int i = 0; i < order.count; ++i) {
    const Axis& axis = shape.axis[order.axis[i]];
    text += i ? ", " : "";
    text += axis.extent >= 0 ? std::to_string(axis.extent) : std::string(axis.name);
    text += axis.or_one && axis.extent != 1 ? "|1" : "";
  }
  return text + "]";
}

// What leads on from a mask or a bias as others take them, where axes are counted from the last:
// [b, s] or [b, 1, s] of padding, and [b, sq, sk] of all heads.
const char* hint_of(const Problem& p, const Sizes& s, int index) {
  if (index != TESSERA_MASK && index != TESSERA_BIAS) return "";
  const int64_t* extent = p.tensor[index].extent;
  if (extent[0] != 1) return "";
  const bool is_mask = index == TESSERA_MASK;
  const bool is_row = extent[3] == s.sk || extent[3] == s.sq;
  if (is_row &&
      ((extent[1] == 1 && extent[2] == s.batch) || (extent[1] == s.batch && extent[2] == 1))) {
    return is_mask ? "; for a [b, s] mask of padding pass seqlens_k, the lengths, or the mask as "
                     "[b, 1, 1, sk]"
                   : "; for a [b, s] bias of padding pass seqlens_k, the lengths, or the bias as "
                     "[b, 1, 1, sk]";
  }
  if (extent[1] == s.batch && extent[2] == s.sq && extent[3] == s.sk) {
    return is_mask ? "; for one mask of all heads pass it as [b, 1, sq, sk]"
                   : "; for one bias of all heads pass it as [b, 1, sq, sk]";
  }
  return "";
}

Status check_shape(const Problem& p, const Sizes& s, int index) {
  const Tensor& t = p.tensor[index];
  const Shape shape = expected_shape(p, s, index);
  bool ok = index != TESSERA_KEY_RANGES || t.extent[3] == 2 || t.extent[3] == 4;
  bool needs_max_seqlen = false;
  for (int i = 0; i < tensor_rule(index).rank; ++i) {
    const Axis& axis = shape.axis[i];
    if (axis.extent == kFree || t.extent[i] == axis.extent || (axis.or_one && t.extent[i] == 1)) {
      continue;
    }
    ok = false;
    needs_max_seqlen |= axis.extent == kUnknown;
  }
  if (ok) return {};
  if (needs_max_seqlen) {
    return invalid(
        "%s.shape=%s: must be %s, where packed (thd) sides need max_seqlen_q and "
        "max_seqlen_k; give them, or broadcast that axis",
        name_of(p, index), shape_text(p, index).c_str(), text_of(p, shape, index).c_str());
  }
  return invalid("%s.shape=%s: must be %s, to go with q.shape=%s and k.shape=%s%s",
                 name_of(p, index), shape_text(p, index).c_str(), text_of(p, shape, index).c_str(),
                 shape_text(p, TESSERA_Q).c_str(), shape_text(p, TESSERA_K).c_str(),
                 hint_of(p, s, index));
}

// ---- strides ----

std::string stride_text(const Problem& p, int index) {
  const AxisOrder order = caller_order(p, index);
  std::string text = "[";
  for (int i = 0; i < order.count; ++i) {
    text += (i ? ", " : "") + std::to_string(p.tensor[index].stride[order.axis[i]]);
  }
  return text + "]";
}

enum class LastAxis { kAny, kDense, kDenseOrExpanded };

LastAxis last_axis_rule(int index) {
  switch (index) {
    case TESSERA_Q:
    case TESSERA_K:
    case TESSERA_V:
    case TESSERA_O:
    case TESSERA_DO:
    case TESSERA_DQ:
    case TESSERA_DK:
    case TESSERA_DV:
    case TESSERA_DBIAS:
      return LastAxis::kDense;
    case TESSERA_BIAS:
    case TESSERA_MASK:
    case TESSERA_KEY_RANGES:
    case TESSERA_KEEP_TAIL:
      return LastAxis::kDenseOrExpanded;
  }
  return LastAxis::kAny;
}

bool contiguous(const Tensor& t, int rank) {
  Count expected = 1;
  for (int axis = rank - 1; axis >= 0; --axis) {
    if (t.extent[axis] > 1 && t.stride[axis] != expected.value()) return false;
    expected *= t.extent[axis];
  }
  return true;
}

Status check_strides(const Problem& p, int index) {
  const Tensor& t = p.tensor[index];
  const int rank = tensor_rule(index).rank;
  const auto broken = [&](const char* rule) {
    return invalid("%s.stride=%s: %s", name_of(p, index), stride_text(p, index).c_str(), rule);
  };
  if (element_count(t, rank) == 0) return {};
  bool zero = false;
  for (int axis = 0; axis < rank; ++axis) {
    if (t.extent[axis] <= 1) continue;
    if (t.stride[axis] < 0) return broken("must not be negative; pass a copy");
    zero |= t.stride[axis] == 0;
  }
  const int64_t last = t.extent[rank - 1] > 1 ? t.stride[rank - 1] : 1;
  const LastAxis rule = last_axis_rule(index);
  if (rule == LastAxis::kDense && last != 1) {
    return broken("the last axis must have stride 1; pass a contiguous copy");
  }
  if (rule == LastAxis::kDenseOrExpanded && last != 1 && last != 0) {
    return broken("the last axis must have stride 1, or 0 where it is expanded; pass a copy");
  }
  if (!is_output(p, index)) return {};
  if (zero) return broken("an output must not be expanded (stride 0); pass an array of its own");
  if (overlaps_itself(t, rank)) {
    return broken("an output must not overlap itself; pass an array of its own");
  }
  if ((index == TESSERA_LSE || index == TESSERA_MAX_LOGIT) && !contiguous(t, rank)) {
    return broken("the forward pass writes it contiguous; pass a contiguous array");
  }
  return {};
}

// ---- sizes that other shapes are made of ----

Status check_axis(const Problem& p, int index, int axis, int64_t least, const char* name) {
  if (!given(p, index)) return {};
  if (p.tensor[index].extent[axis] > kMostExtent) {
    return invalid("%s.shape=%s: %s=%" PRId64 " must be at most 2^60", name_of(p, index),
                   shape_text(p, index).c_str(), name, p.tensor[index].extent[axis]);
  }
  if (p.tensor[index].extent[axis] >= least) return {};
  return invalid("%s.shape=%s: %s=%" PRId64 " must be at least %" PRId64, name_of(p, index),
                 shape_text(p, index).c_str(), name, p.tensor[index].extent[axis], least);
}

}  // namespace

Status validate_sizes(const Problem& p) {
  for (int i = 0; i < TESSERA_NUM_TENSORS; ++i) {
    if (!given(p, i)) continue;
    for (int axis = 0; axis < tensor_rule(i).rank; ++axis) {
      TESSERA_RETURN_IF_ERROR(check_axis(p, i, axis, 0, "an extent"));
    }
    if (!fits_in_memory(p.tensor[i], tensor_rule(i).rank)) {
      return invalid("%s.shape=%s: its bytes, with stride=%s, must fit in 63 bits; check the sizes",
                     name_of(p, i), shape_text(p, i).c_str(), stride_text(p, i).c_str());
    }
  }
  TESSERA_RETURN_IF_ERROR(check_axis(p, TESSERA_Q, 2, 1, "heads"));
  TESSERA_RETURN_IF_ERROR(check_axis(p, TESSERA_Q, 3, 1, "head_dim"));
  TESSERA_RETURN_IF_ERROR(check_axis(p, TESSERA_K, 2, 1, "heads"));
  TESSERA_RETURN_IF_ERROR(check_axis(p, TESSERA_K, 3, 1, "head_dim"));
  TESSERA_RETURN_IF_ERROR(check_axis(p, TESSERA_V, 3, 1, "head_dim"));
  TESSERA_RETURN_IF_ERROR(check_axis(p, TESSERA_CU_SEQLENS_Q, 0, 1, "b + 1"));
  TESSERA_RETURN_IF_ERROR(check_axis(p, TESSERA_CU_SEQLENS_K, 0, 1, "b + 1"));
  TESSERA_RETURN_IF_ERROR(check_axis(p, TESSERA_PAGE_TABLE_K, 1, 1, "max_pages"));
  if (is_paged(p)) {
    TESSERA_RETURN_IF_ERROR(check_axis(p, TESSERA_K, 1, 1, "page_size"));
    const Count keys =
        Count{p.tensor[TESSERA_PAGE_TABLE_K].extent[1]} * p.tensor[TESSERA_K].extent[1];
    if (kMostExtent < keys) {
      return invalid(
          "page_table.shape=%s: max_pages times page_size must be at most 2^60; check the sizes",
          shape_text(p, TESSERA_PAGE_TABLE_K).c_str());
    }
  }
  if (is_thd_q(p) && p.tensor[TESSERA_Q].extent[0] != 1) {
    return invalid("q.extent[0]=%" PRId64
                   ": a thd tensor has batch extent 1; its tokens are on "
                   "axis 1",
                   p.tensor[TESSERA_Q].extent[0]);
  }
  return {};
}

Status validate_tensors(const Problem& p) {
  for (int i = 0; i < TESSERA_NUM_TENSORS; ++i) {
    if (given(p, i)) TESSERA_RETURN_IF_ERROR(validate_dtype(p, i));
  }
  TESSERA_RETURN_IF_ERROR(validate_sizes(p));
  const Sizes s = sizes_of(p);
  for (int i = 0; i < TESSERA_NUM_TENSORS; ++i) {
    if (given(p, i)) TESSERA_RETURN_IF_ERROR(check_shape(p, s, i));
  }
  if (s.hq % s.hk != 0) {
    return invalid("k.shape=%s: the heads of q (%" PRId64
                   ") must be a multiple of the heads of k "
                   "and v (%" PRId64 "); repeat or drop heads%s",
                   shape_text(p, TESSERA_K).c_str(), s.hq, s.hk, layout_hint(p));
  }
  for (int i = 0; i < TESSERA_NUM_TENSORS; ++i) {
    if (given(p, i)) TESSERA_RETURN_IF_ERROR(check_strides(p, i));
  }
  return {};
}

std::string list_text(const int64_t* values, int count) {
  std::string text = "[";
  for (int i = 0; i < count; ++i) text += (i ? ", " : "") + std::to_string(values[i]);
  return text + "]";
}

bool fits_in_memory(const Tensor& t, int rank) {
  Count count = size_of(t.dtype), reach = size_of(t.dtype);
  for (int axis = 0; axis < rank; ++axis) {
    const int64_t extent = t.extent[axis] > 0 ? t.extent[axis] : 1;
    count *= extent;
    if (extent > 1 && t.stride[axis] > 0) {
      reach += Count{t.stride[axis]} * size_of(t.dtype) * (extent - 1);
    }
  }
  return count.fits() && reach.fits();
}

}  // namespace tessera
