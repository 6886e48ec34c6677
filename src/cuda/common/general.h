// SPDX-License-Identifier: Apache-2.0
// The backend that takes whatever the specialised folders leave: any GPU, any alignment. Defined by
// the folder that is it, so that no folder includes another.
#pragma once

#include "core/choose/backend.h"

namespace tessera::cuda {

const Backend& general_backend();

}  // namespace tessera::cuda
