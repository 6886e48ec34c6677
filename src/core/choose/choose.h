// SPDX-License-Identifier: Apache-2.0
// Choosing a backend: the first of the ordered list that is on this machine and supports the
// problem. No registration, no priorities: the order of the list is the preference.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/choose/backend.h"

namespace tessera {

using BackendList = std::span<const Backend* const>;

// The name in problem.backend; "" when the choice is free.
std::string_view forced_backend(const Problem& problem);

// The problem with TESSERA_BACKEND forced where it names none itself. TESSERA_INVALID when the name
// is of no backend in the list, or another environment variable is wrong.
Result<Problem> with_forced_backend(BackendList backends, const Problem& problem);

// The device struct, or why it is illegal.
Result<Device> import_device(const tessera_device* caller);

// A backend whose plan() refused the problem, and why.
struct Refusal {
  const Backend* backend;
  std::string text;
};

// What a backend says of a problem: why it would not run it; and if it would, or would if it were
// built and loaded, by which kernels, and why another is faster, unless it is forced.
struct Answer {
  std::vector<Reason> reasons;
  std::string yields, kernels;
};
Answer answer_of(const Backend& backend, const Problem& problem, const Device& device,
                 bool imagined = false);

// The first answer, in the order of the list, that has no reasons and does not yield; where all
// without reasons yield, the first of them. -1: none.
int first_of(std::span<const Answer> answers);

// The backend that runs a normalised problem, as first_of() says, but for those that are known to
// refuse its plan. Success allocates nothing but what backends that yield say; a refusal lists every
// backend with all of its reasons and a line that repeats the question.
Result<const Backend*> choose(BackendList backends, const Problem& problem, const Device& device,
                              std::span<const Refusal> refused = {});

// Every reason why this backend would not run the problem: forced by another name, not on this
// machine or not in this build (unless the device itself is only imagined), and its own.
std::vector<Reason> reasons_of(const Backend& backend, const Problem& problem, const Device& device,
                               bool imagined = false);

// "cpu", "sm90", or "cuda" where the architecture is not given: what explain --device takes.
std::string device_text(const Device& device);

// The first backend of this machine that owns merge and dropout_mask on the device.
Result<const Backend*> choose_utilities(BackendList backends, const Device& device);

}  // namespace tessera
