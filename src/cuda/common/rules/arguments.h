// SPDX-License-Identifier: Apache-2.0
// Kernel arguments from a problem. No CUDA header.
#pragma once

#include "core/problem/problem.h"
#include "cuda/common/params.h"

namespace tessera::cuda {

// The arguments of a validated, normalised problem. Touches no memory behind the pointers. The
// views are null if buffers lack pointers (shapes only).
Params params_of(const Problem& problem, const Buffers& buffers);

// A tensor as kernels see it, of all four axes.
View view_of(const Tensor& t, void* data);

// A tensor of the extents of `like`, in C order; rows of its last axis begin at multiples of 16
// bytes. bytes_of: what it takes.
Tensor dense_like(const Tensor& like, int32_t dtype);
int64_t bytes_of(const Tensor& dense);

// True if sequences have positions, diagonals or windows that are read on the device, in 64 bits.
bool has_positions(const Problem& problem);

// True of precision="fp8": 16-bit inputs that the quantiser rounds (common/quantise).
inline bool is_rounded(const Problem& problem) { return has(problem, TESSERA_FP8_PRODUCTS); }

// What of the problem counts rows from TESSERA_Q_START, or keys from TESSERA_K_START, beyond the
// diagonal of a sequence, which both move: "dropout", "key_ranges", "a bias" or "a mask" over a
// packed side. Null: nothing, or `index` is not given.
const char* counted_from(const Problem& problem, int index);

// Queries and keys of the longest sequence as far as the host can know.
int64_t most_queries(const Problem& problem);
int64_t most_keys(const Problem& problem);

// Buffers of a call with everything that the problem gives, at addresses aligned to 256 bytes that
// nobody may read, and with scalars of 1 and 0.5: for whoever asks what such a call would run.
Buffers nominal_buffers(const Problem& problem);

}  // namespace tessera::cuda
