// SPDX-License-Identifier: Apache-2.0
// THE list of backends, in order of preference. The front door's only.
#pragma once

#include "core/choose/choose.h"

namespace tessera {

// Those of this build, and in its place a stand-in for each one that was left out of it: explain
// says why it is not there.
BackendList all_backends();

// The list without the stand-ins.
BackendList built_backends();

}  // namespace tessera
