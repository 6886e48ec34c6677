// SPDX-License-Identifier: Apache-2.0
// Random problems over the whole case language, small and often at its edges.
#pragma once

#include <cstdint>
#include <string>

namespace tessera {

struct RandomCase {
  std::string text;
  bool legal = true;     // else one rule of docs/semantics.md or docs/cases.md is broken
  bool refused = false;  // legal, but no CPU backend other than the reference computes it
};

// A pure function of its arguments.
RandomCase random_case(uint32_t seed, uint64_t index);

}  // namespace tessera
