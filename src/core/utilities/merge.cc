// SPDX-License-Identifier: Apache-2.0
#include "core/utilities/merge.h"

#include <cinttypes>

#include "core/validate/overlap.h"
#include "core/validate/validate.h"

namespace tessera {
namespace {

// One tensor of a merge, with its name for messages: "o_parts[2]".
struct Operand {
  std::string name;
  const Tensor* tensor;
  const void* data;
  int rank;
  bool output;
};

// o of parts in 16 bits may be fp32, which sums of sums need, and the other way round.
bool may_hold(int32_t o, int32_t parts) {
  return o == parts || (is_16bit(o) && parts == TESSERA_FP32) ||
         (o == TESSERA_FP32 && is_16bit(parts));
}

Status check_operand(const Operand& a, const int64_t (&extent)[4], int32_t dtype) {
  const Tensor& t = *a.tensor;
  const char* name = a.name.c_str();
  const bool o = a.output && a.rank == 4;
  TESSERA_RETURN_IF_ERROR(check_tensor_field(name, t));
  if (o ? !may_hold(t.dtype, dtype) : t.dtype != dtype) {
    return invalid("%s.dtype=%s: must be %s%s; convert it", name, dtype_name(t.dtype).data(),
                   dtype_name(dtype).data(),
                   !o                      ? ", as all parts have one dtype"
                   : is_16bit(dtype)       ? " or fp32, beside parts of it"
                   : dtype == TESSERA_FP32 ? ", bf16 or fp16, beside parts of it"
                                           : ", as the parts have");
  }
  for (int axis = 0; axis < a.rank; ++axis) {
    if (t.extent[axis] != extent[axis]) {
      return invalid("%s.shape=%s: must be %s, to go with o_parts[0]", name,
                     list_text(t.extent, a.rank).c_str(), list_text(extent, a.rank).c_str());
    }
  }
  if (!fits_in_memory(t, a.rank)) {
    return invalid("%s.shape=%s: its bytes, with stride=%s, must fit in 63 bits; check the sizes",
                   name, list_text(t.extent, a.rank).c_str(), list_text(t.stride, a.rank).c_str());
  }
  if (element_count(t, a.rank) == 0) return {};
  bool zero = false;
  for (int axis = 0; axis < a.rank; ++axis) {
    if (t.extent[axis] <= 1) continue;
    if (t.stride[axis] < 0) {
      return invalid("%s.stride=%s: must not be negative; pass a copy", name,
                     list_text(t.stride, a.rank).c_str());
    }
    zero |= t.stride[axis] == 0;
  }
  if (a.rank == 4 && t.extent[3] > 1 && t.stride[3] != 1) {
    return invalid("%s.stride=%s: the last axis must have stride 1; pass a contiguous copy", name,
                   list_text(t.stride, a.rank).c_str());
  }
  if (a.output && (zero || overlaps_itself(t, a.rank))) {
    return invalid("%s.stride=%s: an output must not overlap itself; pass an array of its own",
                   name, list_text(t.stride, a.rank).c_str());
  }
  if (!a.data) {
    return invalid("%s.data=NULL: must point to the elements of shape %s", name,
                   list_text(t.extent, a.rank).c_str());
  }
  if (reinterpret_cast<uintptr_t>(a.data) % static_cast<uintptr_t>(size_of(t.dtype)) != 0) {
    return invalid("%s.data=%p: must be a multiple of the element's %" PRId64
                   " bytes; pass an "
                   "aligned copy",
                   name, a.data, size_of(t.dtype));
  }
  return {};
}

Status check_shared(const Operand& a, const Operand& b) {
  if (!share_memory(footprint_of(*a.tensor, a.rank, a.data),
                    footprint_of(*b.tensor, b.rank, b.data))) {
    return {};
  }
  return invalid(
      "%s.data=%p: shares memory with %s; an output needs elements of its own, pass "
      "another buffer",
      a.name.c_str(), a.data, b.name.c_str());
}

}  // namespace

Status validate(const MergeArgs& args) {
  if (args.num_parts < 1) {
    return invalid("num_parts=%" PRId64 ": must be at least 1", args.num_parts);
  }
  if (args.format < TESSERA_BSHD || args.format > TESSERA_THD) {
    return invalid("layout=%d: must be bshd (0), sbhd (1), bhsd (2) or thd (3)", args.format);
  }
  if (!args.o_parts || !args.o_data || !args.lse_parts || !args.lse_data) {
    return invalid(
        "parts=NULL: o_parts, o_data, lse_parts and lse_data must be arrays of "
        "num_parts=%" PRId64 " elements",
        args.num_parts);
  }
  const Tensor& first = args.o_parts[0];
  if (!is_float(first.dtype) || is_fp8(first.dtype)) {
    return invalid("o_parts[0].dtype=%s: must be fp32, bf16, fp16 or fp64; convert it",
                   dtype_name(first.dtype).data());
  }
  for (int axis = 0; axis < 4; ++axis) {
    const int64_t least = axis < 2 ? 0 : 1;
    if (first.extent[axis] < least ||
        (axis == 0 && args.format == TESSERA_THD && first.extent[0] != 1)) {
      return invalid(
          "o_parts[0].shape=%s: must be [b, sq, hq, dv] with heads and head_dim at least "
          "1, and b = 1 for thd",
          list_text(first.extent, 4).c_str());
    }
  }
  const int64_t o_extent[4] = {first.extent[0], first.extent[1], first.extent[2], first.extent[3]};
  const int64_t lse_extent[4] = {first.extent[0], first.extent[2], first.extent[1]};
  const int32_t lse_dtype = first.dtype == TESSERA_FP64 ? TESSERA_FP64 : TESSERA_FP32;

  const Operand o{"o", &args.o, args.o_out, 4, true};
  const Operand lse{"lse", &args.lse, args.lse_out, 3, true};
  TESSERA_RETURN_IF_ERROR(check_operand(o, o_extent, first.dtype));
  TESSERA_RETURN_IF_ERROR(check_operand(lse, lse_extent, lse_dtype));
  TESSERA_RETURN_IF_ERROR(check_shared(o, lse));
  for (int64_t i = 0; i < args.num_parts; ++i) {
    const std::string index = "[" + std::to_string(i) + "]";
    const Operand o_part{"o_parts" + index, &args.o_parts[i], args.o_data[i], 4, false};
    const Operand lse_part{"lse_parts" + index, &args.lse_parts[i], args.lse_data[i], 3, false};
    TESSERA_RETURN_IF_ERROR(check_operand(o_part, o_extent, first.dtype));
    TESSERA_RETURN_IF_ERROR(check_operand(lse_part, lse_extent, lse_dtype));
    for (const Operand* output : {&o, &lse}) {
      TESSERA_RETURN_IF_ERROR(check_shared(*output, o_part));
      TESSERA_RETURN_IF_ERROR(check_shared(*output, lse_part));
    }
  }
  return {};
}

}  // namespace tessera
