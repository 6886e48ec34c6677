// SPDX-License-Identifier: Apache-2.0
// The kernels around cuDNN's, for problems whose sequences have lengths of their own.
#pragma once

#include <cuda_runtime_api.h>

#include "core/status.h"
#include "cuda/common/params.h"
#include "cuda/cudnn/graph.h"

namespace tessera::cuda::cudnn {

// Rows of the tensor of queries, packed or padded: as many stats has per head.
inline int64_t stats_rows(const Params& p) {
  return p.thd_q ? int64_t{p.sq} : int64_t{p.batch} * p.sq;
}

// Queues the kernel that writes the lengths and offsets of `pointers` for a graph of the shape, from
// any of the contract's forms. Sequences that the graph has beyond the problem's are empty.
Status queue_lengths(const Params& params, const Shape& shape, const Pointers& pointers,
                     cudaStream_t stream);

// Queues the kernel that writes what cuDNN leaves: lse from stats, [rows, hq], and, of rows that see
// no key, of padding, of gaps and of the tail, o = 0 and lse = -inf.
Status queue_rest(const Params& params, const float* stats, cudaStream_t stream);

// Before the backward pass: queues the kernel that writes the caller's lse to stats, as the graph of
// `shape` has them. Rows of an lse of -inf get 0, so that their weights are e^(-inf - 0), and not NaN.
Status queue_stats(const Params& params, const Shape& shape, float* stats, cudaStream_t stream);

// Behind it: queues the kernels that clear dq of rows that see no key, dk and dv of keys that no row
// sees, and what lies in padding, gaps and tails.
Status queue_rest_of_gradients(const Params& params, cudaStream_t stream);

}  // namespace tessera::cuda::cudnn
