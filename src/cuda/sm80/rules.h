// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/common/rules/backend.h"

namespace tessera::cuda::sm80 {

// What "cuda_sm80" can, and with which kernels.
class Sm80Rules : public Rules {
 public:
  std::string_view name() const final { return "cuda_sm80"; }
  Support supports(const Problem& problem, const Device& device) const final;
  std::string kernels_for(const Problem& problem, const Device& device) const final;

 protected:
  std::vector<const char*> kernel_names() const final;
};

}  // namespace tessera::cuda::sm80
