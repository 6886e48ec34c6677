// SPDX-License-Identifier: Apache-2.0
// Chooses the rows of the tables that a problem runs in. Asks no GPU and includes no CUDA header.
#pragma once

#include <array>
#include <bit>
#include <string>

#include "core/problem/problem.h"
#include "cuda/common/params.h"
#include "cuda/sm80/kernels.h"
#include "cuda/sm80/stream/tile.h"

namespace tessera::cuda::sm80 {

enum class Pass { forward, decode, dq, dkdv, dbias, fused };

// Shared memory of a CTA: sm80 has 163 KB, sm90 and sm100 227.
inline constexpr int kLargeSharedBytes = 200 * 1024;

// The first row of the pass that serves these features, holds the head dims and fits in
// shared_bytes, what the device has for a CTA. Null if there is none.
const Kernel* find_kernel(Pass pass, uint32_t features, int dtype, int64_t head_dim,
                          int shared_bytes);

// The features that a kernel must have for the problem, as far as shapes tell; kOther stands for a
// bias or a mask that the lean loops do not take. The second one adds what the alignment of a
// call's tensors asks for.
uint32_t needs_of(const Problem& problem);
uint32_t needs_of(const Problem& problem, const Params& p);

// True if dense masks reach the kernel as bits (cuda/common/score/blocks.h).
inline bool reads_bits(const Kernel& kernel) {
  return (kernel.features & kMasks) != 0 && kernel.features != kGeneral;
}

// The kernels of a pass for one dtype and head dim, found by their features.
class KernelSet {
 public:
  KernelSet() = default;
  KernelSet(Pass pass, int dtype, int64_t head_dim, int shared_bytes) {
    for (unsigned i = 0; i < kOfEverything; ++i) {
      kernels_[i] = find_kernel(pass, i == 0 ? 0 : 1u << (i - 1), dtype, head_dim, shared_bytes);
    }
    kernels_[kOfEverything] = find_kernel(pass, kEverything, dtype, head_dim, shared_bytes);
    kernels_[kOfAll] = find_kernel(pass, kGeneral, dtype, head_dim, shared_bytes);
  }
  // Null if the table has none.
  const Kernel* operator[](uint32_t features) const {
    if ((features & (features - 1)) == 0) return kernels_[std::bit_width(features)];
    return kernels_[features & kOther ? kOfAll : kOfEverything];
  }
  auto begin() const { return kernels_.begin(); }
  auto end() const { return kernels_.end(); }

 private:
  static constexpr unsigned kOfEverything = std::bit_width(uint32_t{kGeneral}) + 1,
                            kOfAll = kOfEverything + 1;
  std::array<const Kernel*, kOfAll + 1> kernels_{};
};

// The kernels of stream/ for one problem: by rows of a tile, null where the table has none.
using StreamKernels = std::array<const StreamKernel*, 4>;

struct ForwardKernels {
  KernelSet forward, decode;
  StreamKernels stream;

  ForwardKernels(const Problem& canonical, int shared_bytes);
  // The stream kernel that takes a problem or a call, or null: those of 16 bits with few rows and
  // no features but pages and an E4M3 cache.
  const StreamKernel* stream_of(const Problem& problem) const;
  const StreamKernel* stream_of(const Problem& problem, const Params& p) const;
  // The kernels of the pass, forward or decode, that the problem takes; and the one of a call.
  const KernelSet& of(const Problem& problem) const;
  const Kernel& of(const Problem& problem, const Params& p) const;
};

// Rows of queries and packed heads that a CTA owns.
int rows_of(const Kernel& kernel);
// Heads of a group that share the rows of a CTA.
int pack_of(const Problem& problem, int rows);

// The kernels of a backward pass in seven products, and that of dbias.
struct ApartKernels {
  const Kernel* dq;
  const Kernel* dkdv;
  const Kernel* dbias;
};

struct BackwardKernels {
  KernelSet fused;
  ApartKernels apart;

  BackwardKernels(const Problem& canonical, int shared_bytes);
  // The kernel that makes all three gradients, or null: by shapes alone, which decide the
  // workspace, and for a call.
  const Kernel* fused_of(const Problem& problem, uint32_t needs) const;
  const Kernel* fused_of(const Problem& problem, const Params& p) const;
};

// True if a fused kernel can also add to dQ in a fixed order, or make no dQ (Code::in_turn).
inline bool adds_in_turn(const Kernel& kernel) { return kernel.features == kLean; }

// True if the kernel adds to sums of dQ in this call; without queries there are none.
bool adds_to_dq(const Params& p, const Kernel& kernel);

// Names of what a supported problem launches, joined by ", ".
std::string forward_names(const Problem& problem, int shared_bytes);
std::string backward_names(const Problem& problem, int shared_bytes);

}  // namespace tessera::cuda::sm80
