// SPDX-License-Identifier: Apache-2.0
// The reference: docs/semantics.md spelled out row by row, without tiles, online softmax or
// core/mask, so that no bug there can hide here. O(sq * sk * d) time, O(tokens) memory.
//
// Exact arithmetic is fp64 throughout: the oracle. Low arithmetic is what the error rule measures
// kernels against: fp32, every sum in the order of its terms, with P (and dS) rounded to the input
// dtype before their products and every result rounded to its dtype.
//
// precision="fp8" is rounding too: exact arithmetic is of the caller's values, low arithmetic of
// what the quantiser makes of them. Stored arithmetic is fp64 of the latter.
#pragma once

#include <vector>

#include "core/problem/problem.h"

namespace tessera::reference {

enum class Arithmetic { kExact, kStored, kLow };

// Results by tensor index, dense in the axis order of enum tessera_index with the extents of the
// problem; empty when not computed. Values at bytes outside the problem are what the library writes
// there: 0, and -inf in lse.
struct ReferenceValues {
  std::vector<double> value[TESSERA_NUM_TENSORS];
  // Exact arithmetic only. A gradient that is a sum over rows, heads or a broadcast axis has the
  // sum of the absolute values of its terms, of dq and dk beside fp8 q those that dP and delta are
  // sums of; lse and max_logit have the largest scale * (sum |q||k|
  // + |pre-scale bias|) + |post-scale bias| + |slope * distance| behind it.
  std::vector<double> terms[TESSERA_NUM_TENSORS];
};

// Dense values of the outputs of a problem with TESSERA_ACCUMULATE, before a call; none without it.
ReferenceValues held_outputs(const Problem& problem, const Buffers& buffers);
// What the call makes of them: o and lse of both parts, or sums of gradients. Nothing without
// TESSERA_ACCUMULATE.
void add_held(const Problem& problem, const ReferenceValues& held, ReferenceValues& out);

// Buffers are on the host and validated with the problem. num_threads >= 1. Allocates.
// Forward computes o and lse, and max_logit if it is given. A backward problem gets the forward
// pass of the same question. held: of held_outputs; null: outputs are not added to anything.
ReferenceValues reference_forward(const Problem& problem, const Buffers& buffers,
                                  Arithmetic arithmetic, int num_threads,
                                  const ReferenceValues* held = nullptr);

// The given gradients. o and lse are dense, as reference_forward returns them: those that the
// backward pass is given, rounded or not.
ReferenceValues reference_backward(const Problem& problem, const Buffers& buffers,
                                   Arithmetic arithmetic, int num_threads,
                                   const std::vector<double>& o, const std::vector<double>& lse,
                                   const ReferenceValues* held = nullptr);

// N of the error rule's floor (docs/semantics.md, "Precision"), in units of 2^-24 of what each
// element hangs on: of o, or of the given gradients. o and lse as in reference_backward; the
// forward pass reads neither. Costs as much as the backward pass.
ReferenceValues reference_floor(const Problem& problem, const Buffers& buffers,
                                const std::vector<double>& o, const std::vector<double>& lse);

// `value` as an element of o, a gradient or lse holds it: rounded to its dtype, for fp8 beside its
// scale, saturating.
double rounded_as(const Problem& problem, const Buffers& buffers, int index, double value);

// The largest absolute value, NaN if there is one.
double largest_of(const std::vector<double>& values);

// A tensor of any strides as dense doubles, and back with one rounding.
// `scale` is what its elements are multiplied by.
std::vector<double> load_dense(const Tensor& tensor, int rank, const void* data, double scale = 1);
void store_dense(const Tensor& tensor, int rank, const std::vector<double>& values, void* data,
                 double scale = 1);

}  // namespace tessera::reference
