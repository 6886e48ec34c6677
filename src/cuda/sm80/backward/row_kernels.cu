// SPDX-License-Identifier: Apache-2.0
#include "cuda/common/launch.h"
#include "cuda/sm80/backward/gradient.cuh"
#include "cuda/sm80/backward/row_kernels.h"

namespace tessera::cuda::sm80 {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kRows = 16 * kWarps, kColumns = 64;
static_assert(kRows == kRowsOfStatistics);

struct StatisticsArgs {
  BackwardArgs b;
  Cleared cleared;
  DqOrder* order;
  float below;  // read by kernels of low rows
};

// What T holds of 64 columns of an fp32 o, rounded; rest: what that leaves, in T. Where o is a row
// of v nothing is left.
template <typename T>
__device__ void load_part_of_wide(T* tile, const QueryRows& rows, int columns, bool rest) {
  for (int i = threadIdx.x; i < kRows * kColumns; i += kThreads) {
    const int r = i / kColumns, c = i % kColumns;
    const char* row = rows(r);
    const float x = row && c < columns ? reinterpret_cast<const float*>(row)[c] : 0.f;
    const T part = static_cast<T>(x);
    T* const to = tile + r * kSmemStride<T, kColumns> + c;
    *to = rest ? static_cast<T>(x - static_cast<float>(part)) : part;
  }
}

// Makes delta by the products that dP is made of, as the diagonal of dO O^T. Where o is a row of v,
// because one key is visible, dP - delta is then exactly 0. An fp32 o beside 16 bits is the sum of
// two of these: kWide. kOfLow: leaves tiles out that hold no row whose lse is below args.below.
template <typename T, bool kWide, bool kOfLow = false>
__global__ void __launch_bounds__(kThreads)
    row_statistics_kernel(const __grid_constant__ StatisticsArgs args) {
  __shared__ __align__(16) T grad_o[kRows * kSmemStride<T, kColumns>];
  __shared__ __align__(16) T o[kRows * kSmemStride<T, kColumns>];
  const Params& p = args.b.params;
  const int64_t cta = blockIdx.y * int64_t{gridDim.x} + blockIdx.x,
                ctas = gridDim.y * int64_t{gridDim.x};
  for (int64_t i = cta * kThreads + threadIdx.x; i < args.cleared.words; i += ctas * kThreads) {
    static_cast<uint4*>(args.cleared.data)[i] = {0, 0, 0, 0};
  }
  if (args.order && cta == 0) {
    const bool overlap = sequences_overlap(p);
    if (threadIdx.x == 0) args.order->overlap = overlap;
  }
  const TileOfRows tile = tile_of_slot<SideOfQueries>(p, blockIdx.x, kRows);
  const Sequence sequence = sequence_of(p, tile.n);
  if (tile.begin >= sequence.q.owned_hi) return;
  const int head = blockIdx.y, warp_row = threadIdx.x / 32 * 16;
  if constexpr (kOfLow) {
    if (!holds_row_below<kRows>(p, sequence, head, tile.begin, args.below)) return;
  }
  float product[8] = {};
  for (int part = 0; part < (kWide ? 2 : 1); ++part) {
    QueryRows grad_o_rows = query_rows(p, TESSERA_DO, sequence, head, tile.begin, 1, kRows);
    QueryRows o_rows = query_rows(p, TESSERA_O, sequence, head, tile.begin, 1, kRows);
    for (int c = 0; c < p.dv; c += kColumns) {
      if (part + c > 0) __syncthreads();
      load_tile<T, kRows, kColumns, kThreads>(grad_o, grad_o_rows, p.dv - c, p.tensor[TESSERA_DO]);
      if constexpr (kWide) {
        load_part_of_wide(o, o_rows, p.dv - c, part == 1);
      } else {
        load_tile<T, kRows, kColumns, kThreads>(o, o_rows, p.dv - c, p.tensor[TESSERA_O]);
      }
      commit_copies();
      wait_for_copies<0>();
      meet_and_split<T, kColumns, kWarps, kRows, kRows>(grad_o, o);
      multiply_nt<T, 16, kColumns>(product, grad_o, warp_row,
                                   o + warp_row * kSmemStride<T, kColumns>, kColumns);
      grad_o_rows.base += kColumns * sizeof(T);
      o_rows.base += kColumns * (kWide ? sizeof(float) : sizeof(T));
    }
  }
  // The diagonal's rows r and r + 8 are with the thread that has columns r and r + 8.
  if (lane_minor() / 2 != lane_major() / 2) return;
  const View& lse = p.tensor[TESSERA_LSE];
  const View& grad_lse = p.tensor[TESSERA_DLSE];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int query = tile.begin + warp_row + lane_major() + 8 * half;
    if (query < sequence.q.owned_lo || query >= sequence.q.owned_hi) continue;
    const int64_t at = statistics_at(p, sequence, head) + query;
    float row_lse = 0, delta = 0;
    if (query >= 0 && query < sequence.q.length) {
      const int64_t stored = sequence.q.first + query;
      delta = lane_major() % 2 ? product[6 * half + 1] : product[6 * half];
      if (grad_lse.data) {
        delta -= static_cast<const float*>(
            grad_lse.data)[offset_of(grad_lse, sequence.q.batch, head, stored)];
      }
      row_lse =
          static_cast<const float*>(lse.data)[offset_of(lse, sequence.q.batch, head, stored)] *
          kFromNatural<T>;
      // Rows that see no key; beside a bias, a sink may have left them an lse.
      const float lowest = p.tensor[TESSERA_BIAS].data ? kLowest * kFromNatural<T> : -kInfinity;
      if (row_lse <= lowest) row_lse = 0;
    }
    args.b.lse[at] = row_lse;
    args.b.delta[at] = delta;
  }
}

template <typename T>
const void* statistics_kernel(bool is_wide, bool of_low) {
  if (of_low) return reinterpret_cast<const void*>(&row_statistics_kernel<T, false, true>);
  return is_wide ? reinterpret_cast<const void*>(&row_statistics_kernel<T, true>)
                 : reinterpret_cast<const void*>(&row_statistics_kernel<T, false>);
}

// Sums over the CTA in a fixed order; the result is thread 0's.
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
  const View& lse = p.tensor[TESSERA_LSE];
  const float sink = of_sink ? sink_of(p, head) : 0;
  // Natural, since units of log2 would not hold 3e38. A row without weights has an lse of -inf.
  const auto weight_of_sink = [&](const Rows& rows, int i) {
    const float row_lse =
        static_cast<const float*>(lse.data)[offset_of(lse, rows.batch, head, rows.first + i)];
    return row_lse == -kInfinity ? 0.f : exp2_approx((sink - row_lse) * kLog2e);
  };

  float sum = 0;
  const int begin = one_sequence ? blockIdx.y : 0, end = one_sequence ? begin + 1 : p.batch;
  for (int n = begin; n < end; ++n) {
    const Rows rows = rows_of<SideOfQueries>(p, n);
    const int64_t at = (int64_t{rows.batch} * p.hq + head) * p.sq + rows.first;
    for (int i = threadIdx.x; i < rows.length; i += kThreads) {
      sum += of_sink ? -weight_of_sink(rows, i) * args.delta[at + i] : args.slope_rows[at + i];
    }
  }
  sum = sum_of_threads(sum);
  if (threadIdx.x == 0) {
    const int64_t at = of_sink ? head * out.stride[0] : offset_of(out, blockIdx.y, head);
    if (p.flags & TESSERA_ACCUMULATE) sum += load_float(out.data, at, out.dtype);
    store_float(out.data, at, out.dtype, sum);
  }
}

}  // namespace

Status launch_row_statistics(const BackwardArgs& b, Cleared cleared, DqOrder* order,
                             cudaStream_t stream, std::optional<float> below) {
  const StatisticsArgs args{b, cleared, order, below.value_or(0)};
  const Params& p = b.params;
  const int slots = num_tile_slots(p.thd_q, p.sq, p.batch, kRows);
  if (slots == 0) return {};
  const dim3 grid(static_cast<unsigned>(slots), static_cast<unsigned>(p.hq));
  const int32_t dtype = p.tensor[TESSERA_Q].dtype;
  const bool is_wide = p.tensor[TESSERA_O].dtype != dtype;
  const void* kernel = reinterpret_cast<const void*>(&row_statistics_kernel<float, false>);
  if (dtype == TESSERA_BF16) kernel = statistics_kernel<__nv_bfloat16>(is_wide, below.has_value());
  if (dtype == TESSERA_FP16) kernel = statistics_kernel<__half>(is_wide, below.has_value());
  return launch_kernel("row_statistics", kernel, grid, kThreads, 0, &args, stream);
}

Status launch_row_sums(const BackwardArgs& args, cudaStream_t stream) {
  const Params& p = args.params;
  const View& slopes = p.tensor[TESSERA_DALIBI_SLOPES];
  if (!slopes.data && !p.tensor[TESSERA_DSINK].data) return {};
  const int sequences = slopes.data && slopes.stride[0] != 0 ? p.batch : 1;
  const dim3 grid(static_cast<unsigned>(p.hq), static_cast<unsigned>(sequences), 2);
  return launch_kernel("row_sums", reinterpret_cast<const void*>(&row_sums_kernel), grid, kThreads,
                       0, &args, stream);
}

}  // namespace tessera::cuda::sm80
