// SPDX-License-Identifier: Apache-2.0
// The host side of the backward pass in two kernels.
#include <algorithm>
#include <utility>

#include "cuda/common/launch.h"
#include "cuda/sm90/backward_sink.h"
#include "cuda/sm90/backward_two_plan.h"
#include "cuda/sm90/plan.h"
#include "cuda/sm90/tensormap.h"

namespace tessera::cuda::sm90 {
namespace {

// As in the forward pass whose CTAs ask for tiles early: so many heads stand side by side as have
// their streams, q and dO, in this much of the L2, and these at least.
constexpr int64_t kL2Bytes = 32 << 20;
constexpr int64_t kLeastHeads = 32;

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
  w.bytes = w.delta + (w.delta - w.lse2);  // delta is as large as lse2
  return w;
}

void order_key_tiles(DkdvParams& a) {
  const Params& p = a.problem;
  const int tiles_n = (p.sk + kTwoRows - 1) / kTwoRows;
  const int heads = p.batch * p.hk;
  a.tiles = num_tile_slots(p.thd_k, p.sk, p.batch, kTwoRows) * p.hk;
  a.longest_first = p.right >= 0;
  constexpr int64_t kElementBytes = 2;
  const int64_t bytes_of_head = kElementBytes * p.group * p.sq * (p.dqk + p.dv);
  int per_section =
      static_cast<int>(std::min<int64_t>(std::max(kL2Bytes / bytes_of_head, kLeastHeads), heads));
  while (heads % per_section != 0) --per_section;
  a.tiles_n = Divisor::of(tiles_n);
  a.heads = Divisor::of(p.hk);
  a.heads_per_section = Divisor::of(per_section);
  a.per_section = Divisor::of(per_section * tiles_n);
}

// A pass of the forward pass's shape: o is dq, with the columns of q, and there is neither lse nor
// a sink. lse stands beside, as an input.
DqParams dq_params(const ForwardParams& forward, const Buffers& buffers,
                   const Workspace& workspace) {
  DqParams a{};
  static_cast<ForwardParams&>(a) = forward;
  Params& p = a.problem;
  a.lse = p.tensor[TESSERA_LSE];
  a.grad_lse = p.tensor[TESSERA_DLSE];
  p.tensor[TESSERA_O] = p.tensor[TESSERA_DQ];
  p.tensor[TESSERA_LSE] = p.tensor[TESSERA_SINK] = View{};
  p.dv = p.dqk;
  auto* base = static_cast<char*>(buffers.workspace);
  a.slots = workspace.slots;
  a.lse2 = reinterpret_cast<float*>(base + workspace.lse2);
  a.delta = reinterpret_cast<float*>(base + workspace.delta);
  return a;
}

DkdvParams dkdv_params(const ForwardParams& forward, const DqParams& q, const Problem& problem) {
  DkdvParams a{};
  a.problem = forward.problem;
  a.ragged_q = given(problem, TESSERA_SEQLENS_Q) || a.problem.thd_q;
  a.ragged_k = forward.ragged_v;
  a.slots = q.slots;
  a.lse2 = q.lse2;
  a.delta = q.delta;
  return a;
}

// Rows of q, dO and o past a sequence's end may hold NaN. In dq's kernel they are rows of their
// own, which are not stored; in the other one they are summed over: those maps are ragged.
Status map_tensors(const Problem& problem, const Buffers& buffers, DqParams& q, DkdvParams& k) {
  const auto map = [&](int index, bool ragged, CUtensorMap* to) {
    return map_of(problem, buffers, index, kRowsOfBox, ragged, to);
  };
  const Params& p = k.problem;
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
  return map(TESSERA_DV, p.thd_k, &k.grad_v);
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
  const ForwardParams forward = forward_params(problem, buffers);
  DqParams q = dq_params(forward, buffers, workspace);
  DkdvParams k = dkdv_params(forward, q, problem);
  TESSERA_RETURN_IF_ERROR(map_tensors(problem, buffers, q, k));
  order_tiles(kTwoRows, multiprocessors, buffers, q);
  order_key_tiles(k);
  k.mark = q.mark;
  if (k.tiles > multiprocessors) {
    k.counter = reinterpret_cast<TileCounter*>(static_cast<char*>(buffers.workspace) +
                                               workspace.key_counter);
  }
  TESSERA_RETURN_IF_ERROR(
      launch(kernels.dq, std::min(q.tiles, multiprocessors), kernels.dq_shared_bytes, &q, stream));
  TESSERA_RETURN_IF_ERROR(launch(kernels.dkdv, std::min(k.tiles, multiprocessors),
                                 kernels.dkdv_shared_bytes, &k, stream));
  return launch_dsink(k, rows_of_block(kernels.dim), stream);
}

}  // namespace tessera::cuda::sm90
