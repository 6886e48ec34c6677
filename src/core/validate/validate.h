// SPDX-License-Identifier: Apache-2.0
// The parts of validate() that live in files of their own. Each answers the first broken rule.
#pragma once

#include "core/problem/problem.h"

namespace tessera {

// Numbers of enums, unknown flags, reserved fields. What follows may index by a dtype.
Status validate_fields(const Problem& problem);

// Sizes that other shapes are made of, and that no tensor's bytes overflow.
Status validate_sizes(const Problem& problem);

// dtypes, shapes, byte sizes, strides and self-overlap of every tensor of a problem whose formats,
// presence of tensors and kinds of lengths are legal.
Status validate_tensors(const Problem& problem);

// The dtype of one tensor, beside those of the others.
Status validate_dtype(const Problem& problem, int index);

// The tensor whose shape a gradient shares, and its dtype but for fp8 and sums in fp32; do: o.
int tensor_like(int index);

// "[2, 5]": extents or strides of tensors that no problem names.
std::string list_text(const int64_t* values, int count);

// Bytes from the first to past the last element fit in 63 bits, and so does every product of
// extents. Extents are not negative.
bool fits_in_memory(const Tensor& tensor, int rank);

// What every struct of the header promises (docs/abi.md): flags that the library knows, and zeros
// in what is reserved.
Status check_flags(uint32_t flags, uint32_t known);
Status check_reserved(const char* name, std::span<const int64_t> fields);
Status check_tensor_field(const char* name, const Tensor& t);

// The fields of buffers that a call without a problem has too: threads, margin, workspace and what
// is reserved.
Status validate_context(const Buffers& context);

}  // namespace tessera
