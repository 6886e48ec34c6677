// SPDX-License-Identifier: Apache-2.0
#include "core/cache/rotate.h"

#include <cinttypes>
#include <cstddef>

#include "core/cache/operand.h"
#include "core/problem/import.h"

namespace tessera {
namespace {

Operand operand(const RotateArgs& args, int index, const char* name, int rank,
                bool output = false) {
  return {name, &args.tensor[index], args.data[index], rank, output};
}

Status check_positions(const Operand& positions, int64_t b, int64_t s) {
  const int32_t dtype = positions.tensor->dtype;
  if (dtype != TESSERA_INT32 && dtype != TESSERA_INT64) {
    return invalid("positions.dtype=%s: must be int32 or int64", dtype_name(dtype).data());
  }
  return check_operand(positions, {{b, "b", true}, {s, "s", true}}, false);
}

Status check_values(const RotateArgs& args) {
  const Tensor& x = args.tensor[TESSERA_ROTATE_X];
  if (element_count(x, 4) == 0) return {};
  const int64_t max_pos = args.tensor[TESSERA_ROTATE_COS].extent[0];
  for (int64_t n = 0; n < x.extent[0]; ++n) {
    for (int64_t i = 0; i < x.extent[1]; ++i) {
      const int64_t position = position_of(args, n, i);
      if (position >= 0 && position < max_pos) continue;
      return invalid("positions: row %" PRId64 " of sequence %" PRId64 " is at %" PRId64
                     ": must be from 0 to below max_pos=%" PRId64
                     ", the rows of cos; pass longer "
                     "tables",
                     i, n, position, max_pos);
    }
  }
  return {};
}

}  // namespace

int64_t position_of(const RotateArgs& args, int64_t n, int64_t i) {
  const Operand positions = operand(args, TESSERA_ROTATE_POSITIONS, "positions", 2);
  if (!positions.given()) return i;
  const int64_t row = broadcast(*positions.tensor, 0, n);
  if (positions.tensor->extent[1] > 1) return integer_at(positions, row, i);
  const int64_t start = integer_at(positions, row);
  return start < 0 || start > INT64_MAX - i ? -1 : start + i;
}

Status validate(const RotateArgs& args, const Device& device) {
  constexpr const char* kNames[] = {"x", "y", "cos", "sin", "positions"};
  TESSERA_RETURN_IF_ERROR(check_fields(args, TESSERA_INTERLEAVED | TESSERA_INVERSE,
                                       std::size(kNames), [&](size_t i) { return kNames[i]; }));
  const Operand x = operand(args, TESSERA_ROTATE_X, "x", 4);
  const Operand y = operand(args, TESSERA_ROTATE_Y, "y", 4, true);
  const Operand cos = operand(args, TESSERA_ROTATE_COS, "cos", 2);
  const Operand sin = operand(args, TESSERA_ROTATE_SIN, "sin", 2);
  const Operand positions = operand(args, TESSERA_ROTATE_POSITIONS, "positions", 2);
  if (args.format < TESSERA_BSHD || args.format > TESSERA_THD) {
    return invalid("layout=%d: must be bshd (0), sbhd (1), bhsd (2) or thd (3)", args.format);
  }
  if (!is_float(x.tensor->dtype) || is_fp8(x.tensor->dtype)) {
    return invalid("x.dtype=%s: must be fp32, bf16, fp16 or fp64",
                   dtype_name(x.tensor->dtype).data());
  }
  if (y.tensor->dtype != x.tensor->dtype) {
    return invalid("y.dtype=%s: must be %s, as x", dtype_name(y.tensor->dtype).data(),
                   dtype_name(x.tensor->dtype).data());
  }
  const int64_t* e = x.tensor->extent;
  TESSERA_RETURN_IF_ERROR(check_operand(x,
                                        {{args.format == TESSERA_THD ? 1 : OperandAxis::kFree, "b"},
                                         {OperandAxis::kFree, "s"},
                                         {OperandAxis::kFree, "h"},
                                         {OperandAxis::kFree, "d"}},
                                        true));
  TESSERA_RETURN_IF_ERROR(
      check_operand(y, {{e[0], "b"}, {e[1], "s"}, {e[2], "h"}, {e[3], "d"}}, true));
  TESSERA_RETURN_IF_ERROR(check_tables(cos, sin, e[3], "x"));
  if (positions.given()) {
    TESSERA_RETURN_IF_ERROR(check_positions(positions, e[0], e[1]));
  }
  if (!same_place(x, y)) TESSERA_RETURN_IF_ERROR(check_apart(y, x));
  for (const Operand* input : {&cos, &sin, &positions}) {
    TESSERA_RETURN_IF_ERROR(check_apart(y, *input));
  }
  return device.kind == TESSERA_CPU ? check_values(args) : Status();
}

Result<const RotateArgs*> import_rotate(const tessera_rotate_args* caller, RotateArgs& storage) {
  if (!caller) return invalid("args=NULL: must point to a tessera_rotate_args");
  return import_struct(caller, storage, sizeof storage, "rotate_args");
}

}  // namespace tessera
