// SPDX-License-Identifier: Apache-2.0
#include "cuda/common/element.cuh"
#include "cuda/common/launch.h"
#include "cuda/sm90/dbias/host.h"

namespace tessera::cuda::sm90 {
namespace {

constexpr int kThreads = 128;

// A thread an element, in the order of the terms.
__global__ void __launch_bounds__(kThreads)
    dbias_sum(const float* partial, int64_t terms, int64_t elements, int heads, int queries,
              int keys, View out) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= elements) return;
  float sum = 0;
  for (int64_t term = 0; term < terms; ++term) sum += partial[term * elements + i];
  const int64_t row = i / (queries * keys), x = i % (queries * keys);
  store_float(out.data,
              offset_of(out, row / heads, row % heads, keys > 1 ? 0 : x, keys > 1 ? x : 0),
              out.dtype, sum);
}

}  // namespace

Status launch_dbias_sum(const float* partial, int64_t terms, const int (&extent)[4],
                        const View& out, cudaStream_t stream) {
  int64_t elements = int64_t{extent[0]} * extent[1] * extent[2] * extent[3];
  if (elements == 0) return {};
  const auto grid = static_cast<unsigned>((elements + kThreads - 1) / kThreads);
  // A launch by <<<>>> needs cudaGetLastError(), which also answers errors that the caller left.
  int heads = extent[1], queries = extent[2], keys = extent[3];
  View to = out;
  void* arguments[] = {&partial, &terms, &elements, &heads, &queries, &keys, &to};
  return cuda_status(cudaLaunchKernel(reinterpret_cast<const void*>(&dbias_sum), dim3(grid),
                                      dim3(kThreads), arguments, 0, stream),
                     "cudaLaunchKernel (dbias_sum)");
}

}  // namespace tessera::cuda::sm90
