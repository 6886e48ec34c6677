// SPDX-License-Identifier: Apache-2.0
// The half of a CUDA backend that is data: what it can, what another does faster, and which rows of
// its tables run a problem. Compiled into every build; no CUDA header.
#pragma once

#include <string>
#include <vector>

#include "core/choose/backend.h"
#include "cuda/common/rules/device.h"

namespace tessera::cuda {

// Why there is no plan in a build without CUDA.
inline constexpr const char* kNotBuilt =
    "this build has no CUDA backend; install the wheel that has (docs/installation.md)";

// supports(), yields() and kernels_for() of a folder; a build with CUDA overrides the rest.
class Rules : public Backend {
 public:
  std::string unavailable() const override { return kNotBuilt; }
  Problem canonical(const Problem& problem) const override;
  Result<std::unique_ptr<Plan>> plan(const Problem&, const Device&) const override {
    return Status(TESSERA_REFUSED, kNotBuilt);
  }
  std::string description_json() const final;  // {"kernels": [names]}

 protected:
  virtual DeviceTraits traits_of(const Device& device) const { return imagined_traits(device); }
  // The names of all rows of all tables; once for each element type.
  virtual std::vector<const char*> kernel_names() const = 0;
};

// Tiles of all sequences and heads of a side are counted in 32 bits, and none has fewer than 16 rows
// (of several heads, where they share one).
void require_tiles(Support& support, const Problem& problem);

}  // namespace tessera::cuda
