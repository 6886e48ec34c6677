// SPDX-License-Identifier: Apache-2.0
// explain: which backend would run a problem, why each other one would not, and the nearest change
// that makes the problem run.
#pragma once

#include <optional>
#include <string>

#include "core/choose.h"

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

// Empty when the problem runs as it is, or when no known remedy helps. Of a normalised problem.
std::optional<Suggestion> suggest(BackendList backends, const Problem& problem,
                                  const Device& device);

// JSON: case, device, backend (null when none), workspace_bytes (null when unknown),
//   reasons {name: [text]}, backends [{name, available, supported, reasons [{id, text}]}],
//   suggestion null | {text, case, device, backend}.
// Of a normalised problem, with the forced backend's name. case_text describes it. Builds a plan to
// know the workspace.
std::string explain_json(BackendList backends, const Problem& problem, const Device& device,
                         const std::string& case_text);

}  // namespace tessera
