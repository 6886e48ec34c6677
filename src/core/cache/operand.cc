// SPDX-License-Identifier: Apache-2.0
#include "core/cache/operand.h"

#include <cinttypes>

#include "core/validate/overlap.h"

namespace tessera {
namespace {

std::string text_of(std::initializer_list<OperandAxis> axes) {
  std::string text = "[";
  for (const OperandAxis& axis : axes) {
    if (text.size() > 1) text += ", ";
    text += axis.name;
    if (axis.or_one) text += "|1";
    if (axis.extent != OperandAxis::kFree) text += "=" + std::to_string(axis.extent);
  }
  return text + "]";
}

Status check_shape(const Operand& a, std::initializer_list<OperandAxis> axes) {
  int i = 0;
  for (const OperandAxis& axis : axes) {
    const int64_t extent = a.tensor->extent[i++];
    if (extent >= 0 && (axis.extent == OperandAxis::kFree || extent == axis.extent ||
                        (axis.or_one && extent == 1))) {
      continue;
    }
    return invalid("%s.shape=%s: must be %s", a.name, list_text(a.tensor->extent, a.rank).c_str(),
                   text_of(axes).c_str());
  }
  return {};
}

Status check_strides(const Operand& a, bool rows) {
  const Tensor& t = *a.tensor;
  bool zero = false;
  for (int axis = 0; axis < a.rank; ++axis) {
    if (t.extent[axis] <= 1) continue;
    if (t.stride[axis] < 0) {
      return invalid("%s.stride=%s: must not be negative; pass a copy", a.name,
                     list_text(t.stride, a.rank).c_str());
    }
    zero |= t.stride[axis] == 0;
  }
  const int last = a.rank - 1;
  if (rows && t.extent[last] > 1 && t.stride[last] != 1) {
    return invalid("%s.stride=%s: the last axis must have stride 1; pass a contiguous copy", a.name,
                   list_text(t.stride, a.rank).c_str());
  }
  if (a.output && (zero || overlaps_itself(t, a.rank))) {
    return invalid("%s.stride=%s: an output must not overlap itself; pass an array of its own",
                   a.name, list_text(t.stride, a.rank).c_str());
  }
  return {};
}

}  // namespace

Status check_operand(const Operand& a, std::initializer_list<OperandAxis> axes, bool rows) {
  const Tensor& t = *a.tensor;
  TESSERA_RETURN_IF_ERROR(check_shape(a, axes));
  if (!fits_in_memory(t, a.rank)) {
    return invalid("%s.shape=%s: its bytes, with stride=%s, must fit in 63 bits; check the sizes",
                   a.name, list_text(t.extent, a.rank).c_str(),
                   list_text(t.stride, a.rank).c_str());
  }
  if (element_count(t, a.rank) == 0) return {};
  TESSERA_RETURN_IF_ERROR(check_strides(a, rows));
  if (!a.data) {
    return invalid("%s.data=NULL: must point to the elements of shape %s", a.name,
                   list_text(t.extent, a.rank).c_str());
  }
  if (reinterpret_cast<uintptr_t>(a.data) % static_cast<uintptr_t>(size_of(t.dtype)) != 0) {
    return invalid("%s.data=%p: must be a multiple of the element's %" PRId64
                   " bytes; pass an aligned copy",
                   a.name, a.data, size_of(t.dtype));
  }
  return {};
}

Status check_apart(const Operand& a, const Operand& b) {
  if (!a.given() || !b.given() ||
      !share_memory(footprint_of(*a.tensor, a.rank, a.data),
                    footprint_of(*b.tensor, b.rank, b.data))) {
    return {};
  }
  return invalid("%s.data=%p: shares memory with %s; what is written needs elements of its own",
                 a.name, a.data, b.name);
}

bool same_place(const Operand& a, const Operand& b) {
  if (a.data != b.data) return false;
  for (int axis = 0; axis < a.rank; ++axis) {
    if (a.tensor->extent[axis] > 1 && a.tensor->stride[axis] != b.tensor->stride[axis]) {
      return false;
    }
  }
  return true;
}

Status check_tables(const Operand& cos, const Operand& sin, int64_t d, const char* turned) {
  for (const Operand* table : {&cos, &sin}) {
    if (table->tensor->dtype != TESSERA_FP32) {
      return invalid("%s.dtype=%s: must be fp32, [max_pos, r/2]; tessera.rope_table makes one",
                     table->name, dtype_name(table->tensor->dtype).data());
    }
  }
  TESSERA_RETURN_IF_ERROR(
      check_operand(cos, {{OperandAxis::kFree, "max_pos"}, {OperandAxis::kFree, "r/2"}}, true));
  const int64_t positions = cos.tensor->extent[0], half = cos.tensor->extent[1];
  TESSERA_RETURN_IF_ERROR(check_operand(sin, {{positions, "max_pos"}, {half, "r/2"}}, true));
  if (half >= 1 && half <= d / 2) return {};
  return invalid("%s.shape=%s: r/2=%" PRId64 " must be 1 to %" PRId64 ", half the head dim of %s",
                 cos.name, list_text(cos.tensor->extent, 2).c_str(), half, d / 2, turned);
}

int64_t integer_at(const Operand& a, int64_t i, int64_t j) {
  const int64_t at = offset_of(*a.tensor, i, j);
  return a.tensor->dtype == TESSERA_INT32 ? static_cast<const int32_t*>(a.data)[at]
                                          : static_cast<const int64_t*>(a.data)[at];
}

}  // namespace tessera
