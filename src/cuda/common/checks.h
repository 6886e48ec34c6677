// SPDX-License-Identifier: Apache-2.0
// TESSERA_LOG=checks: lengths and tables that lie on the device are looked at before they are used.
#pragma once

#include <cuda_runtime_api.h>

#include "core/problem.h"

namespace tessera::cuda {

// With the topic on, waits for the stream, copies lengths, page tables, sinks and slopes to the
// host and logs the first value that docs/semantics.md forbids, in the words that the CPU refuses
// it with: "cu_seqlens_q[1]=900: must be at most ...". The call goes on: kernels clamp what is out
// of range. Without the topic, one relaxed load. A stream that is being captured is not checked,
// and the log says so.
Status report_checks(const Problem& problem, const Buffers& buffers, cudaStream_t stream);

}  // namespace tessera::cuda
