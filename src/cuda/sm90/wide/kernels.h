// SPDX-License-Identifier: Apache-2.0
// The table of kernels for wide heads: a row for each ROW of wide/table.def and each 16-bit type.
#pragma once

#include <algorithm>

#include "core/problem/problem.h"
#include "cuda/common/params.h"
#include "cuda/common/rules/kernel.h"

namespace tessera::cuda::sm90 {

// The columns of the table. A CTA is a producer and two consumer warpgroups, which share its
// queries.
struct WideTile {
  int dqk, dv;  // head dims up to these; whole chunks of 64 columns of q and k beyond are left out
  int ctas;     // of a cluster, which has the keys in common
  int stages;   // of 16 KB

  static constexpr int kRows = 64;          // of a CTA
  static constexpr int kTileN = 128;        // keys a block
  static constexpr int kKeys = kTileN / 2;  // of a consumer and a box of k
  static constexpr int kValues = 32;        // keys a box of v
  static constexpr int kThreads = 384;

  constexpr int tile_m() const { return kRows * ctas; }
};

struct WideCode {
  int shared_bytes;
  const void* function;  // takes ForwardParams
};

using WideKernel = KernelRow<WideTile, WideCode>;

// All kernels, in the order of wide/table.def.
std::span<const WideKernel> wide_kernels();

// Head dims that run in these kernels, without features.
constexpr int64_t kWideBeyond = 256;
inline bool is_wide(const Sizes& s) { return std::max(s.dqk, s.dv) > kWideBeyond; }

// The kernel with the least head dims of those that hold these, for clusters of so many CTAs; null:
// none.
const WideKernel* find_wide_kernel(int dtype, int64_t dqk, int64_t dv, int ctas = 2);

// The kernel for tiles of one CTA where one is built for the dv of the other; otherwise that.
const WideKernel& low_kernel_of(const WideKernel& clustered, const Problem& problem);

// The second CTA of a cluster has nothing to do but to load half of the keys if a sequence has no
// more rows than a CTA: it does better with a tile of its own, if there are enough for so many
// clusters.
bool runs_alone(const Params& p, int clusters);

}  // namespace tessera::cuda::sm90
