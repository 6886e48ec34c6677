// SPDX-License-Identifier: Apache-2.0
#include "cuda/common/element.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/sequence.cuh"
#include "cuda/sm90/backward/sink.h"

namespace tessera::cuda::sm90 {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

// What lse2 is less by where keys are rounded less their mean, of the row whose statistics stand at
// i of a sequence's, in quads (place_in_quads()).
__device__ float score_of_mean(const BackwardParams& a, const Rows& rows, int head, int i) {
  const Params& p = a.problem;
  const int row = (i & ~15) | (i >> 1 & 1) << 3 | (i >> 2 & 3) << 1 | (i & 1);
  if (!a.row || row >= rows.length) return 0;
  return kLog2e * p.softmax_scale *
         a.row[(int64_t{rows.batch} * p.hq + head) * p.sq + rows.first + row];
}

// One CTA a head. A sequence's statistics lie side by side from its first slot on.
__global__ void __launch_bounds__(kThreads)
    dsink_kernel(const __grid_constant__ BackwardParams a, int tile_m) {
  const Params& p = a.problem;
  const int head = blockIdx.x;
  const View& view = p.tensor[TESSERA_SINK];
  const float sink = kLog2e * load_float(view.data, offset_of(view, head), view.dtype);
  const int blocks = (p.sq + tile_m - 1) / tile_m;
  float sum = 0;
  for (int n = 0; n < p.batch; ++n) {
    const Rows rows = rows_of<SideOfQueries>(p, n);
    const int64_t first =
        int64_t{head} * a.slots + first_slot_of(p.thd_q, n, rows.first, tile_m, blocks);
    // Their order is that of the main kernel, where rows past the end stand among the last 16: they
    // are +inf and 0.
    const int end = (rows.length + 15) / 16 * 16;
    const int of_block = a.has_factors ? 2 * tile_m : tile_m;
    for (int i = threadIdx.x; i < end; i += kThreads) {
      // lse2 is +inf where the sink has all of a row's weight, being very low or above 2.36e38, and
      // where delta is 0.
      const int64_t at = (first + i / tile_m) * of_block + i % tile_m;
      const float lse2 = a.lse2[at] + score_of_mean(a, rows, head, i);
      const float weight = lse2 == kInfinity ? p.dropout_scale : exp2_approx(sink - lse2);
      sum -= weight * a.delta[at];
    }
  }
  __shared__ float sums[kWarps];
#pragma unroll
  for (int i = 16; i > 0; i /= 2) sum += __shfl_xor_sync(~0u, sum, i);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  float total = 0;
  for (const float part : sums) total += part;
  const View& out = p.tensor[TESSERA_DSINK];
  store_float(out.data, offset_of(out, head), out.dtype, total);
}

}  // namespace

Status launch_dsink(const BackwardParams& params, int tile_m, cudaStream_t stream) {
  const Params& p = params.problem;
  if (!p.tensor[TESSERA_DSINK].data) return {};
  // A launch by <<<>>> needs cudaGetLastError(), which also answers errors that the caller left.
  void* arguments[] = {const_cast<BackwardParams*>(&params), &tile_m};
  return cuda_status(
      cudaLaunchKernel(reinterpret_cast<const void*>(&dsink_kernel),
                       dim3(static_cast<unsigned>(p.hq)), dim3(kThreads), arguments, 0, stream),
      "cudaLaunchKernel (dsink)");
}

}  // namespace tessera::cuda::sm90
