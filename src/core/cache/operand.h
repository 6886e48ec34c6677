// SPDX-License-Identifier: Apache-2.0
// The rules that every tensor of tessera_rotate and tessera_append obeys.
#pragma once

#include <iterator>
#include <string>

#include "core/problem/problem.h"
#include "core/validate/validate.h"

namespace tessera {

// One tensor, with its name for messages: "k_cache".
struct Operand {
  const char* name;
  const Tensor* tensor;
  const void* data;
  int rank;
  bool output = false;

  bool given() const { return tensor->dtype != TESSERA_NONE; }
};

// One axis of a shape that is asked for: kFree is any extent, or_one also 1.
struct OperandAxis {
  static constexpr int64_t kFree = -1;
  int64_t extent;
  const char* name;
  bool or_one = false;
};

// What docs/abi.md promises of a struct of arguments: flags that the call knows, numbers of dtypes,
// and zeros in whatever has no meaning. name_of(i) names tensor i of those that have one.
template <typename Args, typename NameOf>
Status check_fields(const Args& args, uint32_t known_flags, size_t tensors, NameOf name_of) {
  TESSERA_RETURN_IF_ERROR(check_flags(args.flags, known_flags));
  const int64_t half[] = {args.reserved_half};
  TESSERA_RETURN_IF_ERROR(check_reserved("args.reserved_half", half));
  TESSERA_RETURN_IF_ERROR(check_reserved("args.reserved", args.reserved));
  for (size_t i = 0; i < std::size(args.tensor); ++i) {
    const Tensor& t = args.tensor[i];
    if (i >= tensors && (t.dtype != TESSERA_NONE || args.data[i])) {
      return invalid("args.tensor[%zu]: has no meaning in this version; leave it 0", i);
    }
    if (t.dtype == TESSERA_NONE) continue;
    if (t.dtype < TESSERA_NONE || t.dtype > TESSERA_INT64) {
      return invalid("%s.dtype=%d: must be a tessera_dtype; 0 means not given", name_of(i),
                     t.dtype);
    }
    TESSERA_RETURN_IF_ERROR(check_tensor_field(name_of(i), t));
  }
  return {};
}

// Shape, byte size, strides (not negative; 1 on the last of several axes where `rows`),
// self-overlap of an output, and a pointer that is there and aligned.
Status check_operand(const Operand& a, std::initializer_list<OperandAxis> axes, bool rows);

// True if each element of one is at the address of the other's, of the same shape.
bool same_place(const Operand& a, const Operand& b);

// Whether two operands, of which one is written, share memory.
Status check_apart(const Operand& a, const Operand& b);

// As written, [max_pos, r/2], equal shapes, and r at most `d`, the head dim of `turned`.
Status check_tables(const Operand& cos, const Operand& sin, int64_t d, const char* turned);

// Element i of an int32 or int64 tensor.
int64_t integer_at(const Operand& a, int64_t i, int64_t j = 0);

}  // namespace tessera
