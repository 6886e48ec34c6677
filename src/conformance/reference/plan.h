// SPDX-License-Identifier: Apache-2.0
// The door between libtessera and the reference in libtessera_check: src/reference.cc calls it
// where both are linked together, as in tests, and loads the library where they are not.
#pragma once

#include "core/choose/backend.h"

// A new plan of the fp64 oracle, which the caller owns. One build of the two libraries only.
extern "C" TESSERA_API tessera::Plan* tessera_reference_plan();
