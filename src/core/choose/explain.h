// SPDX-License-Identifier: Apache-2.0
// explain: which backend would run a problem, why each other one would not, and the nearest change
// that makes the problem run.
#pragma once

#include <optional>
#include <string>

#include "core/choose/choose.h"

namespace tessera {

// A change that was tried: these three, asked again, are supported by `backend`.
struct Suggestion {
  std::string text;  // "convert q, k and v to fp32"
  Problem problem;   // normalised, with backend forced
  Device device;
  const Backend* backend;
};

// A device whose architecture is given need not be here (`imagined` below), so that explain answers
// for hardware that is not in this machine.
bool is_imagined(const Device& device);

// Empty when the problem, which is normalised, runs as it is, or when no known remedy helps.
std::optional<Suggestion> suggest(BackendList backends, const Problem& problem,
                                  const Device& device);

// JSON: case, device, backend (null when none), kernel (names, null when it has none),
//   workspace_bytes (null when unknown), reasons {name: [text]},
//   backends [{name, available, supported, yields, kernel, reasons [{id, text}]}],
//   suggestion null | {text, case, device, backend}.
// available is null of a backend that would open a library to know, where the problem does not need
// it. A backend's yields says why another is faster (null when none is), its kernel what it would run
// if it were built and loaded (null when it cannot).
// The problem is normalised and went through with_forced_backend(); case_text describes it. Builds
// a plan to know the workspace.
std::string explain_json(BackendList backends, const Problem& problem, const Device& device,
                         const std::string& case_text);

}  // namespace tessera
