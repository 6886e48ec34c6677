// SPDX-License-Identifier: Apache-2.0
// Choosing a backend: the first of the ordered list that is on this machine and supports the
// problem. No registration, no priorities: the order of the list is the preference.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/backend.h"

namespace tessera {

using BackendList = std::span<const Backend* const>;

// The name in problem.backend; "" when the choice is free.
std::string_view forced_backend(const Problem& problem);

// The problem with TESSERA_BACKEND forced where it names none itself. TESSERA_INVALID when the name
// is of no backend in the list.
Result<Problem> with_forced_backend(BackendList backends, const Problem& problem);

// The device struct, or why it is illegal.
Result<Device> import_device(const tessera_device* caller);

// The backend that runs a normalised problem. On success nothing is allocated; a refusal lists
// every backend with all of its reasons and a line that repeats the question.
Result<const Backend*> choose(BackendList backends, const Problem& problem, const Device& device);

// Every reason why this backend would not run the problem: forced by another name, not on this
// machine (unless the device itself is only imagined), and its own.
std::vector<Reason> reasons_of(const Backend& backend, const Problem& problem, const Device& device,
                               bool imagined = false);

// "cpu", "sm90", or "cuda" where the architecture is not given: what explain --device takes.
std::string device_text(const Device& device);

}  // namespace tessera
