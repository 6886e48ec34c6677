// SPDX-License-Identifier: Apache-2.0
// Which biases are copied to the workspace before the kernels run, and what these see then. TMA and
// copies of 16 bytes need rows that begin at multiples of 16 bytes; those of a dense bias over 49 or
// 197 keys do not, and element by element a bias takes many times as long. No CUDA header.
#pragma once

#include "core/problem/problem.h"

namespace tessera::cuda::sm90 {

// True if the forward and the backward pass of a supported problem read a copy of its bias: one in
// the type of q, of many queries and many keys, whose strides the kernels cannot use. What only its
// address misaligns is not known here and read as it is. No copy is larger than 256 MiB, nor, beyond
// 64 MiB, than four times q, k, v and o: the workspace stays O(tokens).
//
// Batch-invariant problems have none, since its size, and so the kernel, depends on the batch.
bool pads_bias(const Problem& problem);

// The problem that the kernels run: the same with the copy's strides, or the problem itself. Rows of
// the copy have a multiple of 8 elements and lie one behind the other; axes that the bias shares
// among their elements are shared in it as well.
Problem with_padded_bias(const Problem& problem);

// The rows of a padded bias, and its bytes.
int64_t rows_of_padded(const Tensor& bias);
int64_t bytes_of_padded(const Tensor& bias);

}  // namespace tessera::cuda::sm90
