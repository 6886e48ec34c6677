// SPDX-License-Identifier: Apache-2.0
// The table of dbias kernels: a row for each ROW of dbias/table.def and each 16-bit type.
#pragma once

#include "cuda/common/rules/kernel.h"

namespace tessera::cuda::sm90 {

// The shape of a kernel, the columns of the table: blocks of 64 queries, two warpgroups of 64 keys
// each.
struct DbiasTile {
  int dqk, dv;   // head dims up to these; TMA fills the rest with zeros
  int kv_slots;  // tiles of k and v in shared memory
  int q_stages;  // blocks of q and do
  // True for biases of rows and keys that TMA can bring, where nothing else shapes scores.
  bool plain = false;

  static constexpr int kTileM = 64, kTileN = 128, kConsumers = 2, kThreads = 128 * (kConsumers + 1);
};

struct DbiasCode {
  int shared_bytes;
  const void* function;  // takes DbiasParams; any grid, DbiasTile::kThreads
};

using DbiasKernel = KernelRow<DbiasTile, DbiasCode>;

// All kernels, in the order of dbias/table.def.
std::span<const DbiasKernel> dbias_kernels();

}  // namespace tessera::cuda::sm90
