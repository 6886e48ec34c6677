// SPDX-License-Identifier: Apache-2.0
#include "core/choose/support.h"

namespace tessera {

std::string_view reason_name(ReasonId id) {
  switch (id) {
    case ReasonId::kNotBuilt:
      return "not_built";
    case ReasonId::kNotLoaded:
      return "not_loaded";
    case ReasonId::kDevice:
      return "device";
    case ReasonId::kByNameOnly:
      return "by_name_only";
    case ReasonId::kDtype:
      return "dtype";
    case ReasonId::kHeadDim:
      return "head_dim";
    case ReasonId::kLayout:
      return "layout";
    case ReasonId::kFeature:
      return "feature";
    case ReasonId::kSize:
      return "size";
    case ReasonId::kPlan:
      return "plan";
    case ReasonId::kQuadratic:
      return "quadratic";
  }
  return "unknown";
}

}  // namespace tessera
