// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/common/rules/backend.h"

namespace tessera::cuda::sm90 {

// What "cuda_sm90" can, where cuda_sm80 is faster, and with which kernels.
class Sm90Rules : public Rules {
 public:
  std::string_view name() const final { return "cuda_sm90"; }
  Support supports(const Problem& problem, const Device& device) const final;
  std::string yields(const Problem& problem, const Device& device) const final;
  std::string kernels_for(const Problem& problem, const Device& device) const final;

 protected:
  std::vector<const char*> kernel_names() const final;
};

}  // namespace tessera::cuda::sm90
