// SPDX-License-Identifier: Apache-2.0
// The rules that every tensor of tessera_rotate and tessera_append obeys.
#pragma once

#include <string>

#include "core/problem/problem.h"

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

// Shape, byte size, strides (not negative; 1 on the last of several axes where `rows`),
// self-overlap of an output, and a pointer that is there and aligned.
Status check_operand(const Operand& a, std::initializer_list<OperandAxis> axes, bool rows);

// Whether two operands, of which one is written, share memory.
Status check_apart(const Operand& a, const Operand& b);

// As written, [max_pos, r/2], equal shapes, and r at most `d`, the head dim of `turned`.
Status check_tables(const Operand& cos, const Operand& sin, int64_t d, const char* turned);

// Element i of an int32 or int64 tensor.
int64_t integer_at(const Operand& a, int64_t i, int64_t j = 0);

}  // namespace tessera
