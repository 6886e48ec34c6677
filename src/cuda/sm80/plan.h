// SPDX-License-Identifier: Apache-2.0
// How the sm80 room runs a problem: which kernels, cut how, with what workspace.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <memory>

#include "core/backend.h"
#include "cuda/common/checks.h"
#include "cuda/common/launch.h"
#include "cuda/sm80/kernels.h"

namespace tessera::cuda::sm80 {

// The first kernel of the table that serves these features, holds the head dims and fits in the
// device's shared memory a CTA. Null: none.
// plain: only, and otherwise never, kernels that multiply fp32 by multiply-adds.
const Kernel* find_kernel(Pass pass, unsigned features, int dtype, int64_t head_dim,
                          int shared_bytes, bool plain = false);

// Dense masks reach such a kernel by bits (cuda/common/blocks.h).
inline bool reads_bits(const Kernel& kernel) {
  return (kernel.features & kMasks) != 0 && kernel.features != kEveryFeature;
}

// Allows the kernel its shared memory on the current device; refuses null.
Status prepare(const Kernel* kernel);

// The kernels of a pass for one dtype and head dim, by what they are asked for.
class KernelSet {
 public:
  KernelSet() = default;
  KernelSet(Pass pass, int dtype, int64_t head_dim, int shared_bytes) {
    for (unsigned i = 0; i < kOfShapes; ++i) {
      kernels_[i] = find_kernel(pass, i == 0 ? 0 : 1u << (i - 1), dtype, head_dim, shared_bytes);
    }
    kernels_[kOfShapes] = find_kernel(pass, kShapes, dtype, head_dim, shared_bytes);
    kernels_[kOfAll] = find_kernel(pass, kEveryFeature, dtype, head_dim, shared_bytes);
  }
  // Null: the table has none.
  const Kernel* operator[](unsigned features) const {
    if ((features & (features - 1)) == 0) return kernels_[std::bit_width(features)];
    return kernels_[features & kOther ? kOfAll : kOfShapes];
  }
  Status prepare_all() const {
    for (const Kernel* kernel : kernels_) {
      if (kernel) TESSERA_RETURN_IF_ERROR(prepare(kernel));
    }
    return {};
  }

 private:
  static constexpr unsigned kOfShapes = std::bit_width(kEveryFeature) + 1, kOfAll = kOfShapes + 1;
  std::array<const Kernel*, kOfAll + 1> kernels_{};
};

// What the problem needs beside scale and band, as far as shapes tell; and with what alignment
// adds.
unsigned features_of(const Problem& problem);
unsigned features_of(const Problem& problem, const Params& p);

// Queues a kernel whose only argument is *args.
Status launch(const Kernel& kernel, dim3 grid, const void* args, cudaStream_t stream);

constexpr int64_t kSectionBytes = int64_t{64} << 20;  // of L2, for a section of heads

// Heads whose tiles begin side by side (place.cuh): as many as `bytes`, some of L2, hold of what
// each reads.
inline int section_of(int64_t bytes, int64_t heads, int64_t bytes_a_head) {
  return static_cast<int>(std::clamp<int64_t>(bytes / std::max<int64_t>(bytes_a_head, 1), 1,
                                              std::max<int64_t>(heads, 1)));
}

Result<std::unique_ptr<Plan>> plan_forward(const Problem& canonical, const Device& device);
Result<std::unique_ptr<Plan>> plan_backward(const Problem& canonical, const Device& device);

}  // namespace tessera::cuda::sm80
