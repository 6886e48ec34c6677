// SPDX-License-Identifier: Apache-2.0
#include "cuda/common/launch.h"
#include "cuda/common/sequence.cuh"
#include "cuda/cudnn/lengths.h"

namespace tessera::cuda::cudnn {
namespace {

constexpr int kThreads = 256;
constexpr int kRows = 64;  // of a CTA

struct LengthsArgs {
  Params p;
  int64_t batch;       // of the graph
  int64_t rows, keys;  // of its longest sequence
  int32_t *len_q, *len_k;
  int64_t *offset_q, *offset_k, *offset_v, *offset_o, *offset_stats;
  int64_t *offset_grad_o, *offset_grad_q, *offset_grad_k, *offset_grad_v;  // null: forward
};

// The element where sequence n begins; row: of the packed buffer.
__device__ int64_t begin_of(const View& view, bool packed, int n, int64_t row) {
  return packed ? row * view.stride[1] : n * view.stride[0];
}

// One thread for each of batch + 1 offsets.
__global__ void lengths_kernel(const __grid_constant__ LengthsArgs a) {
  const int64_t n = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (n > a.batch) return;
  const Params& p = a.p;
  // What lies beyond the last sequence begins where that one does, and has no rows.
  const int of = n < p.batch ? static_cast<int>(n) : p.batch - 1;
  const Rows q = rows_of<SideOfQueries>(p, of), k = rows_of<SideOfKeys>(p, of);
  if (n < a.batch) {
    a.len_q[n] = n < p.batch ? clamped(q.length, 0, static_cast<int>(a.rows)) : 0;
    a.len_k[n] = n < p.batch ? clamped(k.length, 0, static_cast<int>(a.keys)) : 0;
  }
  const int64_t past_q = n < p.batch ? 0 : q.length, past_k = n < p.batch ? 0 : k.length;
  const bool thd_q = p.thd_q, thd_k = p.thd_k;
  a.offset_q[n] = begin_of(p.tensor[TESSERA_Q], thd_q, of, q.first + past_q);
  a.offset_o[n] = begin_of(p.tensor[TESSERA_O], thd_q, of, q.first + past_q);
  a.offset_k[n] = begin_of(p.tensor[TESSERA_K], thd_k, of, k.first + past_k);
  a.offset_v[n] = begin_of(p.tensor[TESSERA_V], thd_k, of, k.first + past_k);
  if (a.offset_stats) {
    const int64_t row = thd_q ? q.first + past_q : int64_t{of} * p.sq;
    a.offset_stats[n] = row * p.hq;
  }
  if (!a.offset_grad_o) return;
  a.offset_grad_o[n] = begin_of(p.tensor[TESSERA_DO], thd_q, of, q.first + past_q);
  a.offset_grad_q[n] = begin_of(p.tensor[TESSERA_DQ], thd_q, of, q.first + past_q);
  a.offset_grad_k[n] = begin_of(p.tensor[TESSERA_DK], thd_k, of, k.first + past_k);
  a.offset_grad_v[n] = begin_of(p.tensor[TESSERA_DV], thd_k, of, k.first + past_k);
}

// Clears a row of 16-bit elements.
__device__ void clear_row(const View& view, const Rows& rows, int row, int head, int columns) {
  auto* const out = static_cast<uint16_t*>(view.data) + rows.batch * view.stride[0] +
                    (rows.first + row) * view.stride[1] + head * view.stride[2];
  for (int d = 0; d < columns; ++d) out[d] = 0;
}

struct RestArgs {
  Params p;
  const float* stats;
};

// A CTA has kRows rows of one sequence, of all heads; threads walk the heads of a row, as stats has
// them.
__global__ void rest_kernel(const __grid_constant__ RestArgs a) {
  const Params& p = a.p;
  const TileOfRows tile = tile_of_slot<SideOfQueries>(p, static_cast<int>(blockIdx.x), kRows);
  const Sequence sequence = sequence_of(p, tile.n);
  const Rows& q = sequence.q;
  const View &o = p.tensor[TESSERA_O], &lse = p.tensor[TESSERA_LSE];
  for (int at = threadIdx.x; at < kRows * p.hq; at += kThreads) {
    const int row = tile.begin + at / p.hq, head = at % p.hq;
    if (row < q.owned_lo || row >= q.owned_hi) continue;
    const bool sees = !sequence.band.row(row).empty();
    const int64_t stored = q.first + row;
    if (lse.data) {
      const int64_t of_stats = p.thd_q ? stored : int64_t{tile.n} * p.sq + row;
      const float value = sees ? a.stats[of_stats * p.hq + head] : -INFINITY;
      static_cast<float*>(
          lse.data)[q.batch * lse.stride[0] + head * lse.stride[1] + stored * lse.stride[2]] =
          value;
    }
    if (!sees) clear_row(o, q, row, head, p.dv);
  }
}

struct StatsArgs {
  Params p;
  float* stats;
  int64_t stride_b, stride_h, stride_s;
};

// CTAs and threads as in rest_kernel.
__global__ void stats_kernel(const __grid_constant__ StatsArgs a) {
  const Params& p = a.p;
  const TileOfRows tile = tile_of_slot<SideOfQueries>(p, static_cast<int>(blockIdx.x), kRows);
  const Rows q = rows_of<SideOfQueries>(p, tile.n);
  const View& lse = p.tensor[TESSERA_LSE];
  for (int at = threadIdx.x; at < kRows * p.hq; at += kThreads) {
    const int row = tile.begin + at / p.hq, head = at % p.hq;
    if (row < q.owned_lo || row >= q.owned_hi) continue;
    const int64_t stored = q.first + row;
    float value = -INFINITY;
    if (row >= 0 && row < q.length) {
      value = static_cast<const float*>(
          lse.data)[q.batch * lse.stride[0] + head * lse.stride[1] + stored * lse.stride[2]];
    }
    a.stats[q.batch * a.stride_b + head * a.stride_h + stored * a.stride_s] =
        value == -INFINITY ? 0.f : value;
  }
}

// Side: whose gradients, dq or dk and dv. CTAs and threads as in rest_kernel.
template <typename Side>
__global__ void rest_of_gradients_kernel(const __grid_constant__ Params p) {
  constexpr bool kQueries = std::is_same_v<Side, SideOfQueries>;
  const TileOfRows tile = tile_of_slot<Side>(p, static_cast<int>(blockIdx.x), kRows);
  const Sequence sequence = sequence_of(p, tile.n);
  const Rows& rows = kQueries ? sequence.q : sequence.k;
  const int heads = kQueries ? p.hq : p.hk;
  for (int at = threadIdx.x; at < kRows * heads; at += kThreads) {
    const int row = tile.begin + at / heads, head = at % heads;
    if (row < rows.owned_lo || row >= rows.owned_hi) continue;
    const Interval others = kQueries ? sequence.band.row(row) : sequence.band.rows(row, row + 1);
    if (!others.empty()) continue;
    clear_row(p.tensor[kQueries ? TESSERA_DQ : TESSERA_DK], rows, row, head, p.dqk);
    if (!kQueries) clear_row(p.tensor[TESSERA_DV], rows, row, head, p.dv);
  }
}

}  // namespace

Status queue_lengths(const Params& params, const Shape& shape, const Pointers& pointers,
                     cudaStream_t stream) {
  const LengthsArgs a{.p = params,
                      .batch = shape.batch,
                      .rows = shape.sq,
                      .keys = shape.sk,
                      .len_q = static_cast<int32_t*>(pointers.len_q),
                      .len_k = static_cast<int32_t*>(pointers.len_k),
                      .offset_q = static_cast<int64_t*>(pointers.offset_q),
                      .offset_k = static_cast<int64_t*>(pointers.offset_k),
                      .offset_v = static_cast<int64_t*>(pointers.offset_v),
                      .offset_o = static_cast<int64_t*>(pointers.offset_o),
                      .offset_stats = static_cast<int64_t*>(pointers.offset_stats),
                      .offset_grad_o = static_cast<int64_t*>(pointers.offset_grad_o),
                      .offset_grad_q = static_cast<int64_t*>(pointers.offset_grad_q),
                      .offset_grad_k = static_cast<int64_t*>(pointers.offset_grad_k),
                      .offset_grad_v = static_cast<int64_t*>(pointers.offset_grad_v)};
  const auto ctas = static_cast<unsigned>(shape.batch / kThreads + 1);
  return launch_kernel("lengths of cudnn", reinterpret_cast<const void*>(&lengths_kernel),
                       dim3(ctas), kThreads, 0, &a, stream);
}

Status queue_rest(const Params& params, const float* stats, cudaStream_t stream) {
  const RestArgs a{params, stats};
  const int slots = num_tile_slots(params.thd_q, params.sq, params.batch, kRows);
  return launch_kernel("rest of cudnn", reinterpret_cast<const void*>(&rest_kernel),
                       dim3(static_cast<unsigned>(slots)), kThreads, 0, &a, stream);
}

Status queue_stats(const Params& p, const Shape& shape, float* stats, cudaStream_t stream) {
  // Graphs of packed sequences have their rows behind one another.
  const int64_t* strides = shape.stats;
  const int64_t of_batch = shape.ragged ? p.sq * strides[2] : strides[0];
  const StatsArgs a{p, stats, of_batch, strides[1], strides[2]};
  const int slots = num_tile_slots(p.thd_q, p.sq, p.batch, kRows);
  return launch_kernel("stats of cudnn", reinterpret_cast<const void*>(&stats_kernel),
                       dim3(static_cast<unsigned>(slots)), kThreads, 0, &a, stream);
}

Status queue_rest_of_gradients(const Params& p, cudaStream_t stream) {
  const int slots_q = num_tile_slots(p.thd_q, p.sq, p.batch, kRows),
            slots_k = num_tile_slots(p.thd_k, p.sk, p.batch, kRows);
  TESSERA_RETURN_IF_ERROR(
      launch_kernel("rest of dq of cudnn",
                    reinterpret_cast<const void*>(&rest_of_gradients_kernel<SideOfQueries>),
                    dim3(static_cast<unsigned>(slots_q)), kThreads, 0, &p, stream));
  return launch_kernel("rest of dk and dv of cudnn",
                       reinterpret_cast<const void*>(&rest_of_gradients_kernel<SideOfKeys>),
                       dim3(static_cast<unsigned>(slots_k)), kThreads, 0, &p, stream);
}

}  // namespace tessera::cuda::cudnn
