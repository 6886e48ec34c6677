// SPDX-License-Identifier: Apache-2.0
// The host side of the backward pass in two kernels.
#include <algorithm>
#include <utility>

#include "core/workspace.h"
#include "cuda/common/launch.h"
#include "cuda/sm90/backward/apart/plan.h"
#include "cuda/sm90/backward/schedule/order.h"
#include "cuda/sm90/backward/sink.h"
#include "cuda/sm90/machine/tensormap.h"
#include "cuda/sm90/plan.h"

namespace tessera::cuda::sm90 {
namespace {

// So many heads stand side by side as have their streams, q and dO, in this much of the L2, and
// these at least: the rule of a forward pass whose CTAs ask for tiles early.
constexpr int64_t kL2Bytes = 32 << 20;
constexpr int64_t kLeastHeads = 32;

struct Pieces {
  TileCounter *dq_counter, *key_counter;
  int slots;
  float *lse2, *delta;
};
Pieces take_workspace(const Problem& problem, int dim, Workspace& workspace) {
  const Sizes s = sizes_of(problem);
  Pieces pieces;
  pieces.dq_counter = workspace.take<TileCounter>(1);
  pieces.key_counter = workspace.take<TileCounter>(1);
  pieces.slots = num_slots(is_thd_q(problem), static_cast<int>(s.sq),
                           static_cast<int>(std::max<int64_t>(s.batch, 1)), rows_of_block(dim));
  const Count rows = Count{s.hq} * pieces.slots * rows_of_block(dim);
  pieces.lse2 = workspace.take<float>(rows);
  pieces.delta = workspace.take<float>(rows);
  return pieces;
}

void order_key_tiles(DkdvParams& a) {
  const Params& p = a.problem;
  const int tiles_n = (p.sk + kApartRows - 1) / kApartRows;
  const int heads = p.thd_k ? p.hk : p.batch * p.hk;
  a.tiles = num_tile_slots(p.thd_k, p.sk, p.batch, kApartRows) * p.hk;
  a.longest_first = p.window.right >= 0;
  constexpr int64_t kElementBytes = 2;
  const int64_t bytes_of_head = kElementBytes * p.group * p.sq * (p.dqk + p.dv);
  const int per_section = divisor_up_to(
      heads,
      static_cast<int>(std::min<int64_t>(std::max(kL2Bytes / bytes_of_head, kLeastHeads), heads)));
  set_order({per_section, per_section, {}, {}, 0}, heads, tiles_n, a);
}

// A pass of the forward pass's shape: o is dq, with the columns of q, and there is neither lse nor
// a sink. lse stands beside, as an input.
DqParams dq_params(const ForwardParams& forward, const Pieces& pieces) {
  DqParams a{};
  static_cast<ForwardParams&>(a) = forward;
  Params& p = a.problem;
  a.lse = p.tensor[TESSERA_LSE];
  a.grad_lse = p.tensor[TESSERA_DLSE];
  p.tensor[TESSERA_O] = p.tensor[TESSERA_DQ];
  p.tensor[TESSERA_LSE] = p.tensor[TESSERA_SINK] = View{};
  p.dv = p.dqk;
  a.slots = pieces.slots;
  a.lse2 = pieces.lse2;
  a.delta = pieces.delta;
  return a;
}

DkdvParams dkdv_params(const ForwardParams& forward, const DqParams& q, const Problem& problem) {
  DkdvParams a{};
  a.problem = forward.problem;
  a.reach_q = reach_of(is_ragged_q(problem), a.problem.sq);
  a.reach_k = forward.reach_v;
  a.slots = q.slots;
  a.lse2 = q.lse2;
  a.delta = q.delta;
  return a;
}

// Rows of q, dO and o past a sequence's end may hold NaN. They are rows of their own in dq's
// kernel, which does not store them; the other one sums over them: its maps are ragged.
Status map_tensors(const Problem& problem, const Buffers& buffers, DqParams& q, DkdvParams& k) {
  const auto map = [&](int index, int reach, CUtensorMap* to) {
    return map_of(problem, buffers, index, kRowsOfBox, reach, to);
  };
  const Params& p = k.problem;
  TESSERA_RETURN_IF_ERROR(map(TESSERA_Q, 0, &q.q));
  TESSERA_RETURN_IF_ERROR(map(TESSERA_DO, 0, &q.grad_o));
  TESSERA_RETURN_IF_ERROR(map(TESSERA_O, 0, &q.forward_o));
  TESSERA_RETURN_IF_ERROR(map(TESSERA_K, q.reach_v, &q.k));
  TESSERA_RETURN_IF_ERROR(map(TESSERA_V, q.reach_v, &q.v));
  TESSERA_RETURN_IF_ERROR(map(TESSERA_DQ, reach_of(p.thd_q, p.sq), &q.o));
  TESSERA_RETURN_IF_ERROR(map(TESSERA_Q, k.reach_q, &k.q));
  TESSERA_RETURN_IF_ERROR(map(TESSERA_DO, k.reach_q, &k.grad_o));
  k.k = q.k;
  k.v = q.v;
  const int reach = reach_of(p.thd_k, p.sk);
  TESSERA_RETURN_IF_ERROR(map(TESSERA_DK, reach, &k.grad_k));
  return map(TESSERA_DV, reach, &k.grad_v);
}

Status launch(const char* name, const void* function, int ctas, int shared_bytes, const void* args,
              cudaStream_t stream) {
  return launch_overlapping(name, function, dim3(static_cast<unsigned>(ctas)), kApartThreads,
                            shared_bytes, args, stream);
}

}  // namespace

Status prepare_apart(const ApartKernels& kernels) {
  for (const auto& [function, bytes] : {std::pair{kernels.code->dq, kernels.code->dq_shared_bytes},
                                        {kernels.code->dkdv, kernels.code->dkdv_shared_bytes}}) {
    TESSERA_RETURN_IF_ERROR(cuda_status(
        cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
        "cudaFuncSetAttribute"));
  }
  return {};
}

int64_t apart_workspace_bytes(const ApartKernels& kernels, const Problem& problem) {
  Workspace workspace;
  take_workspace(problem, kernels.tile.dim, workspace);
  return workspace.bytes();
}

Status run_apart(const ApartKernels& kernels, int multiprocessors, const Problem& problem,
                 const Buffers& buffers) {
  const auto stream = static_cast<cudaStream_t>(buffers.stream);
  Workspace workspace(buffers.workspace);
  const Pieces pieces = take_workspace(problem, kernels.tile.dim, workspace);
  const ForwardParams forward = forward_params(problem, buffers);
  DqParams q = dq_params(forward, pieces);
  DkdvParams k = dkdv_params(forward, q, problem);
  TESSERA_RETURN_IF_ERROR(map_tensors(problem, buffers, q, k));
  const int workers = multiprocessors_for(buffers, multiprocessors);
  order_tiles(kApartRows, workers, pieces.dq_counter, q);
  order_key_tiles(k);
  k.mark = q.mark;
  if (k.tiles > workers) k.counter = pieces.key_counter;
  TESSERA_RETURN_IF_ERROR(launch(kernels.name, kernels.code->dq, std::min(q.tiles, workers),
                                 kernels.code->dq_shared_bytes, &q, stream));
  TESSERA_RETURN_IF_ERROR(launch(kernels.name, kernels.code->dkdv, std::min(k.tiles, workers),
                                 kernels.code->dkdv_shared_bytes, &k, stream));
  return launch_dsink(k, rows_of_block(kernels.tile.dim), stream);
}

}  // namespace tessera::cuda::sm90
