// SPDX-License-Identifier: Apache-2.0
// The one place where a plan is asked for its workspace.
#pragma once

#include "core/choose/backend.h"

namespace tessera {

// False if no element of any output exists: then there is nothing to compute, and no plan is asked.
bool writes_anything(const Problem& problem);

// plan.workspace_bytes(); 0 where nothing is written; TESSERA_INVALID, with the name of the extent,
// where sizes that follow from the extents leave 63 bits.
Result<int64_t> workspace_bytes_of(const Plan& plan, const Problem& problem, int num_threads);

}  // namespace tessera
