// SPDX-License-Identifier: Apache-2.0
// The host side of the backward pass in two kernels.
#include <algorithm>

#include "cuda/common/launch.h"
#include "cuda/sm90/backward_sink.h"
#include "cuda/sm90/backward_two_plan.h"
#include "cuda/sm90/plan.h"
#include "cuda/sm90/tensormap.h"

namespace tessera::cuda::sm90 {
namespace {

// As in the forward pass: heads whose streams stand in this much of the L2 side by side.
constexpr int64_t kL2Bytes = 32 << 20;
constexpr int64_t kHeadsInFlight = 32;

struct Workspace {
  int slots;
  int64_t key_counter, lse2, delta, bytes;  // the counter of dq's tiles stands at 0
};
Workspace workspace_of(const Problem& problem, int dim) {
  const Sizes s = sizes_of(problem);
  Workspace w;
  w.slots = num_slots(is_thd_q(problem), static_cast<int>(s.sq),
                      static_cast<int>(std::max<int64_t>(s.batch, 1)), rows_of_block(dim));
  w.key_counter = sizeof(TileCounter);
  w.lse2 = 2 * w.key_counter;
  w.delta = w.lse2 + s.hq * w.slots * rows_of_block(dim) * 4;
  w.bytes = 2 * w.delta - w.lse2;
  return w;
}

void order_key_tiles(DkdvParams& a) {
  const Params& p = a.problem;
  const int tiles_n = (p.sk + kTwoRows - 1) / kTwoRows;
  const int heads = p.batch * p.hk;
  a.tiles = num_tile_slots(p.thd_k, p.sk, p.batch, kTwoRows) * p.hk;
  a.longest_first = p.right >= 0;
  const int64_t bytes_of_head = int64_t{2} * p.group * p.sq * (p.dqk + p.dv);
  int per_section = static_cast<int>(
      std::min<int64_t>(std::max(kL2Bytes / bytes_of_head, kHeadsInFlight), heads));
  while (heads % per_section != 0) --per_section;
  a.tiles_n = Divisor::of(tiles_n);
  a.heads = Divisor::of(p.hk);
  a.heads_per_section = Divisor::of(per_section);
  a.per_section = Divisor::of(per_section * tiles_n);
}

Status launch(const void* function, int ctas, int shared_bytes, const void* args,
              cudaStream_t stream) {
  return launch_overlapping("backward", function, dim3(static_cast<unsigned>(ctas)), kTwoThreads,
                            shared_bytes, args, stream);
}

}  // namespace

const TwoKernels* find_two_kernels(int dtype, int64_t dqk, int64_t dv) {
  const int64_t columns = std::max(dqk, dv);
  for (const TwoKernels& kernels : two_kernels()) {
    if (kernels.dtype == dtype && columns <= kernels.dim && columns > kernels.dim - 64 &&
        std::min(dqk, dv) > kernels.dim - 64) {
      return &kernels;
    }
  }
  return nullptr;
}

Status prepare_two(const TwoKernels& kernels) {
  for (const auto& [function, bytes] : {std::pair{kernels.dq, kernels.dq_shared_bytes},
                                        {kernels.dkdv, kernels.dkdv_shared_bytes}}) {
    TESSERA_RETURN_IF_ERROR(cuda_status(
        cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
        "cudaFuncSetAttribute"));
  }
  return {};
}

int64_t two_workspace_bytes(const TwoKernels& kernels, const Problem& problem) {
  return workspace_of(problem, kernels.dim).bytes;
}

Status run_two(const TwoKernels& kernels, int multiprocessors, const Problem& problem,
               const Buffers& buffers) {
  const auto stream = static_cast<cudaStream_t>(buffers.stream);
  const Workspace workspace = workspace_of(problem, kernels.dim);
  auto* base = static_cast<char*>(buffers.workspace);
  const auto map = [&](int index, bool ragged, CUtensorMap* to) {
    return map_of(problem, buffers, index, kRowsOfBox, ragged, to);
  };
  DqParams q{};
  static_cast<ForwardParams&>(q) = forward_params(problem, buffers);
  Params& p = q.problem;
  q.slots = workspace.slots;
  q.lse2 = reinterpret_cast<float*>(base + workspace.lse2);
  q.delta = reinterpret_cast<float*>(base + workspace.delta);
  q.lse = p.tensor[TESSERA_LSE];
  q.grad_lse = p.tensor[TESSERA_DLSE];
  DkdvParams k{};
  k.problem = p;
  k.ragged_q = given(problem, TESSERA_SEQLENS_Q) || p.thd_q;
  k.ragged_k = q.ragged_v;
  k.slots = q.slots;
  k.lse2 = q.lse2;
  k.delta = q.delta;
  p.tensor[TESSERA_O] = p.tensor[TESSERA_DQ];
  p.tensor[TESSERA_LSE] = p.tensor[TESSERA_SINK] = View{};
  p.dv = p.dqk;  // of what stands for o
  TESSERA_RETURN_IF_ERROR(map(TESSERA_Q, false, &q.q));
  TESSERA_RETURN_IF_ERROR(map(TESSERA_DO, false, &q.grad_o));
  TESSERA_RETURN_IF_ERROR(map(TESSERA_O, false, &q.forward_o));
  TESSERA_RETURN_IF_ERROR(map(TESSERA_K, q.ragged_v, &q.k));
  TESSERA_RETURN_IF_ERROR(map(TESSERA_V, q.ragged_v, &q.v));
  TESSERA_RETURN_IF_ERROR(map(TESSERA_DQ, p.thd_q, &q.o));
  TESSERA_RETURN_IF_ERROR(map(TESSERA_Q, k.ragged_q, &k.q));
  TESSERA_RETURN_IF_ERROR(map(TESSERA_DO, k.ragged_q, &k.grad_o));
  k.k = q.k;
  k.v = q.v;
  TESSERA_RETURN_IF_ERROR(map(TESSERA_DK, p.thd_k, &k.grad_k));
  TESSERA_RETURN_IF_ERROR(map(TESSERA_DV, p.thd_k, &k.grad_v));
  order_tiles(kTwoRows, multiprocessors, buffers, q);
  order_key_tiles(k);
  k.mark = q.mark;
  k.counter = k.tiles > multiprocessors
                  ? reinterpret_cast<TileCounter*>(base + workspace.key_counter)
                  : nullptr;
  TESSERA_RETURN_IF_ERROR(
      launch(kernels.dq, std::min(q.tiles, multiprocessors), kernels.dq_shared_bytes, &q, stream));
  TESSERA_RETURN_IF_ERROR(launch(kernels.dkdv, std::min(k.tiles, multiprocessors),
                                 kernels.dkdv_shared_bytes, &k, stream));
  return launch_dsink(k, rows_of_block(kernels.dim), stream);
}

}  // namespace tessera::cuda::sm90
