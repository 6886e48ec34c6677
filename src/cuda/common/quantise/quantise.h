// SPDX-License-Identifier: Apache-2.0
// The quantiser of precision="fp8" on a device: the bits of core/quantise.
#pragma once

#include "core/workspace.h"
#include "cuda/common/launch.h"
#include "cuda/common/quantise/rounded.h"

namespace tessera::cuda {

// The E4M3 arrays of q, k, v and do as tensors: what `like` is, in C order, with rows at multiples
// of 16 bytes.
inline Tensor rounded_like(const Tensor& like) { return dense_like(like, TESSERA_E4M3); }

// Takes the pieces of a problem; those of do, and v by rows, where it is said.
struct RoundedPieces {
  bool grad_o, rows_of_v;
};
Rounded take_rounded(const Problem& problem, const RoundedPieces& pieces, Workspace& workspace);

// Queues the kernels that fill what has been taken. params: of the problem and its buffers. With
// `values`, v of at most kMostColumnsOfValues goes there and not to Rounded::v.
Status launch_quantise(const Problem& problem, const Params& params, const Rounded& to,
                       cudaStream_t stream, const ValuesByColumns* values = nullptr);

}  // namespace tessera::cuda
