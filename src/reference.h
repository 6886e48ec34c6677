// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "core/choose/backend.h"

namespace tessera {

// "reference": the fp64 oracle, selectable by name only. It comes with libtessera_check, a file
// beside this library that is loaded when the first plan is asked for.
const Backend& reference_backend();

}  // namespace tessera
