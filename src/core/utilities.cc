// SPDX-License-Identifier: Apache-2.0
#include "core/utilities.h"

#include <cinttypes>

#include "core/overlap.h"
#include "core/philox.h"
#include "core/validate.h"

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

std::string list_text(const int64_t* values, int count) {
  std::string text = "[";
  for (int i = 0; i < count; ++i) text += (i ? ", " : "") + std::to_string(values[i]);
  return text + "]";
}

Status check_operand(const Operand& a, const int64_t (&extent)[4], int32_t dtype) {
  const Tensor& t = *a.tensor;
  const char* name = a.name.c_str();
  if (t.dtype != dtype) {
    return invalid("%s.dtype=%s: must be %s, as all parts have one dtype; convert it", name,
                   dtype_name(t.dtype).data(), dtype_name(dtype).data());
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
  if (reinterpret_cast<uintptr_t>(a.data) % static_cast<uintptr_t>(size_of(dtype)) != 0) {
    return invalid("%s.data=%p: must be a multiple of the element's %" PRId64
                   " bytes; pass an "
                   "aligned copy",
                   name, a.data, size_of(dtype));
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

Result<DropoutMaskArgs> dropout_mask_args(int64_t b, int64_t hq, int64_t sq, int64_t sk,
                                          double dropout_p, const int64_t* rng_state,
                                          uint8_t* keep) {
  const int64_t shape[4] = {b, hq, sq, sk};
  const Tensor mask{TESSERA_BOOL, 0, {b, hq, sq, sk}, {}};
  if (b < 0 || hq < 1 || sq < 0 || sk < 0 || !fits_in_memory(mask, 4)) {
    return invalid(
        "keep.shape=%s: must be [b, hq, sq, sk] with hq at least 1, nothing negative, "
        "and below 2^63 elements",
        list_text(shape, 4).c_str());
  }
  const uint32_t threshold = dropout_threshold(dropout_p);
  if (threshold == 0 && dropout_p != 0) {
    return invalid(
        "dropout_p=%g: must be in [0, 1), and p * 65536 must round to 1..65535, or be 0 "
        "for no dropout",
        dropout_p);
  }
  if (!rng_state) return invalid("rng_state=NULL: must point to int64 (seed, offset)");
  if (reinterpret_cast<uintptr_t>(rng_state) % sizeof *rng_state != 0) {
    return invalid("rng_state=%p: must be a multiple of 8 bytes; pass an aligned copy",
                   static_cast<const void*>(rng_state));
  }
  const int64_t count = element_count(mask, 4);
  if (!keep && count > 0) {
    return invalid("keep=NULL: must point to the %" PRId64 " bytes of shape %s", count,
                   list_text(shape, 4).c_str());
  }
  return DropoutMaskArgs{b, hq, sq, sk, threshold, rng_state, keep};
}

Result<const Backend*> choose_utilities(BackendList backends, const Device& device) {
  std::string text = "no backend of this machine computes it on " + device_text(device);
  for (const Backend* backend : backends) {
    const std::string why = backend->unavailable();
    if (why.empty() && backend->owns_utilities(device)) return backend;
    text += "\n  " + std::string(backend->name()) + ": " +
            (why.empty() ? "does not own merge and dropout_mask there" : why);
  }
  return Status(TESSERA_REFUSED, text);
}

}  // namespace tessera
