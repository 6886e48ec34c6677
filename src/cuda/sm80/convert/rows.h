// SPDX-License-Identifier: Apache-2.0
// Rows of fp8 and 16-bit tensors as fp32, and back.
#pragma once

#include "cuda/common/launch.h"

namespace tessera::cuda::sm80 {

// Writes scale * value of the rows inside their sequences to `to`, whose rows are aligned and
// padded to 16 bytes; rows outside are left alone, and their scales not read. No pages.
Status launch_widen(const Problem& problem, const Buffers& buffers, int index, const View& to,
                    cudaStream_t stream);

// Columns [first, first + count) of a tensor, as the first ones of a copy.
struct ColumnPart {
  int64_t first, count;
};

// Rounds value / scale of every element of `from`, which is as `to` above, to the tensor's dtype,
// saturating in fp8. The tensor's amax, where it is given, becomes the largest |value|, above which
// is NaN. Parts of the columns are narrowed in order, from 0 on.
Status launch_narrow(const Problem& problem, const Buffers& buffers, int index, const View& from,
                     const ColumnPart& part, cudaStream_t stream);

}  // namespace tessera::cuda::sm80
