// SPDX-License-Identifier: Apache-2.0
// The backend that takes whatever the specialised rooms leave: any GPU, any alignment. Defined by
// the room that is it, so that no room includes another.
#pragma once

#include "core/backend.h"

namespace tessera::cuda {

const Backend& general_backend();

}  // namespace tessera::cuda
