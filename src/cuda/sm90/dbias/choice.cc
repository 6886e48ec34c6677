// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm90/dbias/choice.h"

#include "cuda/sm90/machine/readable.h"

namespace tessera::cuda::sm90 {

const DbiasKernel* find_dbias_kernel(int dtype, int64_t dqk, int64_t dv, bool plain) {
  for (const DbiasKernel& kernel : dbias_kernels()) {
    if (kernel.dtype == dtype && kernel.tile.dqk >= dqk && kernel.tile.dv >= dv &&
        kernel.tile.plain == plain) {
      return &kernel;
    }
  }
  return nullptr;
}

const DbiasKernel& dbias_kernel_of(const Problem& problem, bool plain) {
  const Sizes s = sizes_of(problem);
  const int dtype = problem.tensor[TESSERA_Q].dtype;
  const DbiasKernel* kernel = plain ? find_dbias_kernel(dtype, s.dqk, s.dv, true) : nullptr;
  return kernel ? *kernel : *find_dbias_kernel(dtype, s.dqk, s.dv, false);
}

bool reads_bias_by_vectors(const Params& p) {
  const View& bias = p.tensor[TESSERA_BIAS];
  return bias.data && (p.flags & (TESSERA_SOFTCAP | TESSERA_DROPOUT)) == 0 &&
         !p.tensor[TESSERA_MASK].data && p.num_ranges == 0 &&
         !p.tensor[TESSERA_SEGMENT_IDS_Q].data && !p.tensor[TESSERA_ALIBI_SLOPES].data &&
         bias.stride[3] == 1 && bias.vector_bytes >= (bias.dtype == TESSERA_FP32 ? 8 : 16);
}

const DbiasKernel& dbias_kernel_of(const Problem& problem, const Params& p, int gradient,
                                   const void* bias) {
  return dbias_kernel_of(
      problem, gradient == TESSERA_DBIAS && reads_bias_by_vectors(p) && maps_bias(problem, bias));
}

}  // namespace tessera::cuda::sm90
