// SPDX-License-Identifier: Apache-2.0
// V^T, which E4M3 products need: their operands are k-major, and the k axis of P V are the keys.
//
// [b, hk, dv, keys] bytes, a packed side as one of b = 1 (fp8/params.h says where its sequences
// stand). Within each 16 keys the order is 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15: a register of A
// takes four keys in a row, and a thread has two of one group of eight and two of the next. Zeros
// stand behind a sequence's end, up to its last block.
#pragma once

#include "cuda/common/launch.h"
#include "cuda/sm90/fp8/params.h"

namespace tessera::cuda::sm90 {

inline Count transposed_keys(const Problem& problem) {
  const Sizes s = sizes_of(problem);
  return transposed_keys(is_thd_k(problem), s.sk, s.batch);
}

// Bytes of V^T of a problem.
inline int64_t transposed_bytes(const Problem& problem) {
  const Sizes s = sizes_of(problem);
  return (transposed_keys(problem) * s.dv * s.hk * (is_thd_k(problem) ? 1 : s.batch)).value();
}

// Queues the kernel that writes V^T to `to`.
Status launch_transpose(const Problem& problem, const Params& params, void* to,
                        cudaStream_t stream);

}  // namespace tessera::cuda::sm90
