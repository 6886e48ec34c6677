// SPDX-License-Identifier: Apache-2.0
// Which row of dbias/table.def a gradient runs in. No GPU is asked; no CUDA header.
#pragma once

#include <utility>

#include "core/problem/problem.h"
#include "cuda/common/params.h"
#include "cuda/sm90/dbias/kernels.h"

namespace tessera::cuda::sm90 {

// Sums over scores, and the tensors whose axes they keep.
inline constexpr std::pair<int, int> kGradients[] = {{TESSERA_DBIAS, TESSERA_BIAS},
                                                     {TESSERA_DALIBI_SLOPES, TESSERA_ALIBI_SLOPES}};

// The first row of the table that holds the head dims; null: none.
const DbiasKernel* find_dbias_kernel(int dtype, int64_t dqk, int64_t dv, bool plain);

// The row for any bias; for one that TMA brings (plain), if there is one.
const DbiasKernel& dbias_kernel_of(const Problem& problem, bool plain);

// The row that a gradient of kGradients runs in. bias: the address of its elements.
const DbiasKernel& dbias_kernel_of(const Problem& problem, const Params& p, int gradient,
                                   const void* bias);

// Nothing shapes the scores but the bias and the band, and the bias is read by vectors.
bool reads_bias_by_vectors(const Params& p);

}  // namespace tessera::cuda::sm90
