// SPDX-License-Identifier: Apache-2.0
// What stored fp8 elements stand for: value = stored * scale.
#pragma once

#include "core/problem/problem.h"

namespace tessera {

// The scale of row i of sequence n and head h, of the tensor of scales `index`; 1 where it is not
// given. i counts from the sequence's start, in every format.
double scale_at(const Problem& problem, const Buffers& buffers, int index, int64_t n, int64_t h,
                int64_t i);

// The tensor of scales that belongs to q, k, v, o, do, dq, dk or dv; TESSERA_NUM_TENSORS of others.
int scale_of(int index);

// The tensor of largest values that belongs to o, dq, dk or dv; TESSERA_NUM_TENSORS of others.
int amax_of(int index);

// The tensors whose elements may stand for others, which fp8 q, k and v bring with them.
inline constexpr int kScaledTensors[] = {TESSERA_Q,  TESSERA_K,  TESSERA_V,  TESSERA_O,
                                         TESSERA_DO, TESSERA_DQ, TESSERA_DK, TESSERA_DV};

// The problem of the values themselves: these tensors contiguous in fp32, with copies of their own,
// so without scales and largest values.
Problem problem_of_values(const Problem& problem);

// The element that stands for `value` beside `scale`: value / scale rounded to nearest even, which
// fp8 saturates, infinities too; NaN stays NaN.
void store_scaled(void* base, int64_t index, int32_t dtype, double value, double scale);

}  // namespace tessera
