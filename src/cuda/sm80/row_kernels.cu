// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm80/row_kernels.h"

#include "cuda/common/launch.h"
#include "cuda/sm80/epilogue.cuh"

namespace tessera::cuda::sm80 {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;

// One warp a row and head; rows of a tile of kWarps rows of one sequence.
__global__ void __launch_bounds__(kThreads)
    row_statistics_kernel(const __grid_constant__ BackwardArgs args) {
  const Params& p = args.params;
  const TileOfRows tile = tile_of_slot<SideOfQueries>(p, blockIdx.x, kWarps);
  const Rows rows = rows_of<SideOfQueries>(p, tile.n);
  const int query = tile.begin + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (query < rows.owned_lo || query >= rows.owned_hi) return;
  const bool exists = query >= 0 && query < rows.length;
  const int64_t stored = rows.first + query;
  const View& o = p.tensor[TESSERA_O];
  const View& grad_o = p.tensor[TESSERA_DO];
  const View& lse = p.tensor[TESSERA_LSE];
  const View& grad_lse = p.tensor[TESSERA_DLSE];
  for (int head = blockIdx.y; head < p.hq; head += gridDim.y) {
    float delta = 0, lse2 = 0;
    if (exists) {
      const int64_t o_at = offset_of(o, rows.batch, stored, head);
      const int64_t do_at = offset_of(grad_o, rows.batch, stored, head);
      for (int c = lane; c < p.dv; c += 32) {
        delta += load_float(o.data, o_at + c, o.dtype) * load_float(grad_o.data, do_at + c, grad_o.dtype);
      }
#pragma unroll
      for (int i = 16; i > 0; i /= 2) delta += __shfl_xor_sync(~0u, delta, i);
      if (grad_lse.data) {
        delta -= static_cast<const float*>(
            grad_lse.data)[offset_of(grad_lse, rows.batch, head, stored)];
      }
      lse2 = static_cast<const float*>(lse.data)[offset_of(lse, rows.batch, head, stored)] * kLog2e;
      if (lse2 == -kInfinity) lse2 = 0;
    }
    if (lane == 0) {
      const int64_t at = (int64_t{rows.batch} * p.hq + head) * p.sq + stored;
      args.lse2[at] = lse2;
      args.delta[at] = delta;
    }
  }
}

// Sum over the CTA in a fixed order; the result is thread 0's.
__device__ float sum_of_threads(float value) {
  __shared__ float sums[kWarps];
#pragma unroll
  for (int i = 16; i > 0; i /= 2) value += __shfl_xor_sync(~0u, value, i);
  __syncthreads();
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
  __syncthreads();
  float total = 0;
  for (int w = 0; w < kWarps; ++w) total += sums[w];
  return total;
}

// grid: (head, sequence of the slopes, 0 dsink or 1 dalibi_slopes)
__global__ void __launch_bounds__(kThreads)
    row_sums_kernel(const __grid_constant__ BackwardArgs args) {
  const Params& p = args.params;
  const bool of_sink = blockIdx.z == 0;
  const View& out = p.tensor[of_sink ? TESSERA_DSINK : TESSERA_DALIBI_SLOPES];
  const int head = blockIdx.x;
  const bool one_sequence = !of_sink && out.stride[0] != 0;
  if (!out.data || (blockIdx.y > 0 && !one_sequence)) return;
  const float sink2 = of_sink ? sink_of(p, head) * kLog2e : 0;

  float sum = 0;
  const int begin = one_sequence ? blockIdx.y : 0, end = one_sequence ? begin + 1 : p.batch;
  for (int n = begin; n < end; ++n) {
    const Rows rows = rows_of<SideOfQueries>(p, n);
    const int64_t at = (int64_t{rows.batch} * p.hq + head) * p.sq + rows.first;
    for (int i = threadIdx.x; i < rows.length; i += kThreads) {
      sum += of_sink ? -exp2_approx(sink2 - args.lse2[at + i]) * args.delta[at + i]
                     : args.slope_rows[at + i];
    }
  }
  sum = sum_of_threads(sum);
  if (threadIdx.x == 0) {
    const int64_t at = of_sink ? head * out.stride[0] : offset_of(out, blockIdx.y, head);
    store_float(out.data, at, out.dtype, sum);
  }
}

}  // namespace

Status launch_row_statistics(const BackwardArgs& args, cudaStream_t stream) {
  const Params& p = args.params;
  const int slots = num_tile_slots(p.thd_q, p.sq, p.batch, kWarps);
  if (slots == 0) return {};
  const dim3 grid(static_cast<unsigned>(slots), static_cast<unsigned>(p.hq));
  row_statistics_kernel<<<grid, kThreads, 0, stream>>>(args);
  return cuda_status(cudaGetLastError(), "row statistics kernel");
}

Status launch_row_sums(const BackwardArgs& args, cudaStream_t stream) {
  const Params& p = args.params;
  const View& slopes = p.tensor[TESSERA_DALIBI_SLOPES];
  if (!slopes.data && !p.tensor[TESSERA_DSINK].data) return {};
  const int sequences = slopes.data && slopes.stride[0] != 0 ? p.batch : 1;
  const dim3 grid(static_cast<unsigned>(p.hq), static_cast<unsigned>(sequences), 2);
  row_sums_kernel<<<grid, kThreads, 0, stream>>>(args);
  return cuda_status(cudaGetLastError(), "row sums kernel");
}

}  // namespace tessera::cuda::sm80
