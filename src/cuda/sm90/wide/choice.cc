// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm90/wide/kernels.h"

namespace tessera::cuda::sm90 {

const WideKernel* find_wide_kernel(int dtype, int64_t dqk, int64_t dv, int ctas) {
  const WideKernel* best = nullptr;
  for (const WideKernel& kernel : wide_kernels()) {
    const WideTile& tile = kernel.tile;
    if (kernel.dtype != dtype || tile.ctas != ctas || tile.dqk < dqk || tile.dv < dv) continue;
    if (!best || tile.dqk + tile.dv < best->tile.dqk + best->tile.dv) best = &kernel;
  }
  return best;
}

const WideKernel& low_kernel_of(const WideKernel& clustered, const Problem& problem) {
  const Sizes s = sizes_of(problem);
  const WideKernel* low = find_wide_kernel(clustered.dtype, s.dqk, s.dv, 1);
  return low && low->tile.dv == clustered.tile.dv ? *low : clustered;
}

bool runs_alone(const Params& p, int clusters) {
  const int rows = p.thd_q ? p.sq / p.batch : p.sq;
  return rows <= WideTile::kRows && p.batch * p.hq > clusters;
}

}  // namespace tessera::cuda::sm90
