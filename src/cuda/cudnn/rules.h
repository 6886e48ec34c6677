// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/common/rules/backend.h"
#include "cuda/cudnn/graph.h"

namespace tessera::cuda::cudnn {

// The oldest cuDNN that is used: older ones have known wrong results, and none has been tested.
inline constexpr int kLeastVersion = 91900;

// Why there is no plan in a build without it.
inline constexpr const char* kCudnnNotBuilt =
    "this build has no cuDNN backend; build it with CUDA and the headers of cuDNN and its front "
    "end "
    "(docs/kernels/cudnn.md)";

// True if sequences of the problem have lengths of their own: its graph is ragged.
bool is_ragged(const Problem& problem);

// The graph of a canonical problem.
Shape shape_of(const Problem& canonical);

// What "cudnn" can of the contract, by cuDNN 9.19, without a word from cuDNN: it is neither opened
// nor needed.
class CudnnRules : public Rules {
 public:
  std::string unavailable() const override { return kCudnnNotBuilt; }
  Result<std::unique_ptr<Plan>> plan(const Problem&, const Device&) const override {
    return Status(TESSERA_REFUSED, kCudnnNotBuilt);
  }
  std::string_view name() const final { return "cudnn"; }
  Support supports(const Problem& problem, const Device& device) const final;
  std::string yields(const Problem& problem, const Device& device) const final;
  // Shapes, strides and the band stay; lengths, scales and where sequences begin go. Extents of a
  // packed problem are rounded up, so that one graph serves many.
  Problem canonical(const Problem& problem) const final;

 protected:
  std::vector<const char*> kernel_names() const final { return {}; }
};

}  // namespace tessera::cuda::cudnn
