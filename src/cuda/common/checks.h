// SPDX-License-Identifier: Apache-2.0
// TESSERA_LOG=checks: lengths and tables that lie on the device are looked at before they are used.
#pragma once

#include <cuda_runtime_api.h>

#include "core/cache/append.h"
#include "core/problem/problem.h"

namespace tessera::cuda {

// Queues, if the topic is on, a kernel that looks at lengths, page tables, sinks and slopes, and
// behind it a host function that logs the first value that docs/semantics.md forbids, in the words
// that the CPU refuses it with: "cu_seqlens_q[1]=900: must be at most ...". Nobody waits: the log's
// callback is called by a thread of the driver when the stream comes there, in a graph at every
// replay, and must not call CUDA. The call goes on: kernels clamp what is out of range. A call
// costs one relaxed load when the topic is off.
Status report_checks(const Problem& problem, const Buffers& buffers, cudaStream_t stream);

// Likewise for a call of append: names the first sequence whose tokens have no place, and which of
// them are dropped.
Status report_lost(const AppendArgs& args, cudaStream_t stream);

}  // namespace tessera::cuda
