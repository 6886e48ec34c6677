// SPDX-License-Identifier: Apache-2.0
// THE list of backends, in order of preference. The front door's only.
#pragma once

#include "core/choose/choose.h"

namespace tessera {

// All backends, in the order in which they are asked. One that this build leaves out is represented
// by a stand-in, which tells explain why it is not there.
BackendList all_backends();

// The list without the stand-ins.
BackendList built_backends();

}  // namespace tessera
