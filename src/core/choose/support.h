// SPDX-License-Identifier: Apache-2.0
// Support: a backend's answer to "can you do this?", with every reason why not.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/problem/problem.h"

namespace tessera {

// What a test asserts on, instead of text. One per kind of rule, not one per place.
enum class ReasonId : uint8_t {
  kNotBuilt,    // the backend is not in this build
  kNotLoaded,   // its library or driver is not on this machine
  kDevice,      // tensors are on another kind of device, or its architecture is too old
  kByNameOnly,  // runs only when forced by name
  kDtype,
  kHeadDim,
  kLayout,   // a stride or an alignment
  kFeature,  // a mask, bias, ... that this backend does not have
  kSize,
  kPlan,       // its library has no kernel for it, as only this machine could tell
  kQuadratic,  // would need O(sq*sk) memory without allow_quadratic
};

std::string_view reason_name(ReasonId id);  // "head_dim"

// The nearest edit of the question that removes a reason; explain applies it and looks again.
enum class Remedy : uint8_t {
  kNone,
  kUseFp32,  // q, k, v (and what follows them) in fp32
  kUseBf16,
  kDeviceCpu,          // move the tensors to the CPU
  kForceThisBackend,   // backend="<name>"
  kDropForcedBackend,  // leave backend unset
  kAllowQuadratic,
};

struct Reason {
  ReasonId id;
  Remedy remedy;
  std::string text;  // "head_dim_v=72: must be 64, 128 or 256"
};

// Collects all reasons, not only the first. A success allocates nothing.
class Support {
 public:
  // The text is built only when the rule is broken: pass a callable that returns std::string.
  template <typename Text>
  Support& require(bool ok, ReasonId id, Remedy remedy, Text&& text) {
    if (!ok) reasons_.push_back({id, remedy, text()});
    return *this;
  }
  explicit operator bool() const { return reasons_.empty(); }
  std::span<const Reason> reasons() const& { return reasons_; }
  std::span<const Reason> reasons() const&& = delete;  // would dangle

 private:
  std::vector<Reason> reasons_;
};

}  // namespace tessera
