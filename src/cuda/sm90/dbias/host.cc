// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm90/dbias/host.h"

#include <algorithm>

#include "core/count.h"
#include "cuda/common/launch.h"
#include "cuda/common/rules/arguments.h"
#include "cuda/sm90/dbias/choice.h"
#include "cuda/sm90/machine/tensormap.h"

namespace tessera::cuda::sm90 {
namespace {

// Work is cut for the largest Hopper, so that sums have one order everywhere.
constexpr int kMultiprocessors = 132;

struct Extents {
  int bias[4];
  int batch, heads;
  int queries, keys;  // no sequence is longer
};

// index: BIAS, or ALIBI_SLOPES, which has two axes.
Extents extents_of(const Problem& problem, int index) {
  const Sizes s = sizes_of(problem);
  Extents e;
  for (int axis = 0; axis < 4; ++axis) {
    const bool exists = axis < tensor_rule(index).rank;
    e.bias[axis] = exists ? static_cast<int>(problem.tensor[index].extent[axis]) : 1;
  }
  e.batch = static_cast<int>(std::max<int64_t>(s.batch, 1));
  e.heads = static_cast<int>(s.hq);
  e.queries = static_cast<int>(most_queries(problem));
  e.keys = static_cast<int>(most_keys(problem));
  return e;
}

int divided_up(int x, int y) { return (x + y - 1) / y; }

// The part of the arguments that shapes alone decide.
DbiasCut cut(const Extents& e, const DbiasTile& tile) {
  DbiasCut c{};
  std::copy(std::begin(e.bias), std::end(e.bias), c.extent);
  c.bias_rows = e.bias[0] * e.bias[1];
  c.sequences = e.bias[0] > 1 ? 1 : e.batch;
  c.heads = e.bias[1] > 1 ? 1 : e.heads;
  const int pairs = c.sequences * c.heads;
  const bool rows = e.bias[2] > 1, keys = e.bias[3] > 1;
  c.tiles_m = divided_up(rows ? e.bias[2] : e.queries, DbiasTile::kTileM);
  c.tiles_n = divided_up(keys ? e.bias[3] : e.keys, DbiasTile::kTileN);
  c.resident = rows && keys && pairs <= tile.kv_slots;
  c.groups = c.pair_step = 1;
  const int items = c.bias_rows * (keys ? c.tiles_n : 1);
  if (rows && keys) {
    // Groups of blocks where the last round of items would leave many multiprocessors idle. Each of
    // them reads K and V again: twice as many must use the machine better by a tenth. No more than
    // give each what a plain kernel sums at a time.
    constexpr int kBlocksAtOnce = 2, kMostGroups = 32;
    constexpr double kWorthwhile = 0.1;
    double most_used = 0;
    for (int groups = 1; groups <= std::min(divided_up(c.tiles_m, kBlocksAtOnce), kMostGroups);
         groups *= 2) {
      const int n = items * groups, rounds = divided_up(n, kMultiprocessors);
      const double used = double(n) / (double(rounds) * kMultiprocessors);
      if (used > most_used + kWorthwhile) most_used = used, c.groups = groups;
    }
  } else if (rows) {
    c.groups = c.tiles_m;
  } else {
    // About two items a multiprocessor.
    const int shares = std::max(1, 2 * kMultiprocessors / std::max(items, 1));
    c.pair_step = std::min(shares, pairs);
    c.groups = std::clamp(shares / c.pair_step, 1, std::max(c.tiles_m, 1));
  }
  c.group_size = divided_up(c.tiles_m, c.groups);
  c.items = items * c.pair_step * c.groups;
  // Few bias rows at a time, so that their k, v, q and do stay in L2; but enough for everybody.
  constexpr int kEnough = kMultiprocessors * 9 / 10;
  c.sections = std::clamp(c.items / kEnough, 1, std::max(c.bias_rows, 1));
  while (c.bias_rows % c.sections != 0) --c.sections;
  return c;
}

// That dbias_sum adds for each element where queries or keys share one.
int64_t terms_of(const DbiasCut& c) {
  constexpr int kWarps = 4;  // of a warpgroup: each has rows of its own
  const bool one_query = c.extent[2] == 1, one_key = c.extent[3] == 1;
  return one_query || one_key ? int64_t{one_query ? c.pair_step * c.groups * kWarps : 1} *
                                    (one_key ? DbiasTile::kConsumers : 1)
                              : 0;
}

}  // namespace

Status prepare_dbias(int dtype, int64_t dqk, int64_t dv) {
  for (const bool plain : {false, true}) {
    const DbiasKernel* kernel = find_dbias_kernel(dtype, dqk, dv, plain);
    if (!kernel) continue;
    TESSERA_RETURN_IF_ERROR(cuda_status(
        cudaFuncSetAttribute(kernel->code->function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             kernel->code->shared_bytes),
        "cudaFuncSetAttribute (dbias)"));
  }
  return {};
}

int64_t dbias_workspace_bytes(const Problem& problem) {
  int64_t most = 0;
  for (const auto& [gradient, of] : kGradients) {
    if (!given(problem, gradient)) continue;
    const DbiasCut c = cut(extents_of(problem, of), dbias_kernel_of(problem, false).tile);
    const Count bytes = Count{terms_of(c)} * c.bias_rows * c.extent[2] * c.extent[3] * 4;
    most = std::max(most, bytes.value());
  }
  return most;
}

Status launch_dbias(const Problem& problem, const Buffers& buffers, const Device& device,
                    const BackwardParams& rows, int tile_m, void* workspace) {
  if (!given(problem, TESSERA_DBIAS) && !given(problem, TESSERA_DALIBI_SLOPES)) return {};
  const Result<DeviceInfo> info = device_info(device.ordinal);
  if (!info.ok()) return info.status();
  const auto stream = static_cast<cudaStream_t>(buffers.stream);
  DbiasParams a{};
  const Params& p = a.problem = rows.problem;
  a.reach_q = rows.reach_q;
  a.reach_k = rows.reach_k;
  a.lse2 = rows.lse2;
  a.delta = rows.delta;
  a.in_quads = rows.in_quads;
  a.slots = rows.slots;
  a.tile_m = tile_m;
  a.vectors = reads_bias_by_vectors(p);
  a.partial = static_cast<float*>(workspace);
  const auto map = [&](int index, int box_rows, int reach, CUtensorMap* to) {
    return map_of(problem, buffers, index, box_rows, reach, to);
  };
  TESSERA_RETURN_IF_ERROR(map(TESSERA_Q, DbiasTile::kTileM, a.reach_q, &a.q));
  TESSERA_RETURN_IF_ERROR(map(TESSERA_DO, DbiasTile::kTileM, a.reach_q, &a.grad_o));
  TESSERA_RETURN_IF_ERROR(map(TESSERA_K, DbiasTile::kTileN, a.reach_k, &a.k));
  TESSERA_RETURN_IF_ERROR(map(TESSERA_V, DbiasTile::kTileN, a.reach_k, &a.v));
  for (const auto& [gradient, of] : kGradients) {
    if (!p.tensor[gradient].data) continue;
    const Extents extents = extents_of(problem, of);
    const DbiasKernel& kernel = dbias_kernel_of(problem, p, gradient, buffers.data[TESSERA_BIAS]);
    a.cut = cut(extents, kernel.tile);
    if (a.cut.items == 0) continue;
    if (kernel.tile.plain) {
      const View& bias = p.tensor[TESSERA_BIAS];
      a.bias_of_sequence = bias.stride[0] > 0;
      a.bias_of_head = bias.stride[1] > 0;
      TESSERA_RETURN_IF_ERROR(
          map_of_bias(problem, buffers, TESSERA_BIAS, DbiasTile::kTileM, &a.bias));
    }
    a.out = p.tensor[gradient];
    a.of_slopes = gradient == TESSERA_DALIBI_SLOPES;
    a.factor = !a.of_slopes && has(problem, TESSERA_BIAS_PRE_SCALE) ? p.softmax_scale : 1.f;
    const int ctas =
        std::min(a.cut.items, multiprocessors_for(buffers, info.value().multiprocessors));
    TESSERA_RETURN_IF_ERROR(launch_kernel(kernel.name, kernel.code->function,
                                          dim3(static_cast<unsigned>(ctas)), DbiasTile::kThreads,
                                          kernel.code->shared_bytes, &a, stream));
    if (const int64_t terms = terms_of(a.cut)) {
      TESSERA_RETURN_IF_ERROR(launch_dbias_sum(a.partial, terms, a.cut.extent, a.out, stream));
    }
  }
  return {};
}

}  // namespace tessera::cuda::sm90
