// SPDX-License-Identifier: Apache-2.0
// The table of kernels for multi-head latent attention (MLA): a row for each ROW of mla/table.def
// and each 16-bit type.
#pragma once

#include "cuda/common/rules/kernel.h"

namespace tessera::cuda::sm90 {

// How keys come into shared memory: by boxes of TMA, or row by row by copies of the threads' own, in
// the type of q; or row by row from E4M3, through registers.
enum class MlaKeys : uint8_t { boxes, rows, e4m3 };

// The columns of the table. A CTA is a producer and two consumer warpgroups, which share its rows
// and divide the columns of O.
struct MlaTile {
  int dqk, dv;  // head dims; v is the first dv columns of k
  int ctas;     // that divide a unit's rows; each reads all of its keys
  MlaKeys keys = MlaKeys::boxes;

  static constexpr int kRows = 64;  // of a CTA: queries by heads
  static constexpr int kKeys = 64;  // of a block
  static constexpr int kThreads = 384;
  static constexpr int kMostMergeGroups = 4;  // of threads that sum a row's parts

  constexpr int rows() const { return kRows * ctas; }
  // CTAs that bring each other's keys, as a cluster: what costs work is divided, bytes alone are not.
  constexpr int sharers() const { return keys == MlaKeys::e4m3 ? ctas : 1; }
};

struct MlaCode {
  int shared_bytes;
  const void* function;  // takes MlaArgs
  const void* merge;     // the same; sums the parts of units that are cut
};

using MlaKernel = KernelRow<MlaTile, MlaCode>;

// All kernels, in the order of mla/table.def.
std::span<const MlaKernel> mla_kernels();

}  // namespace tessera::cuda::sm90
