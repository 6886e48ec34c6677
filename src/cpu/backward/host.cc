// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>

#include "core/mask/sequence.h"
#include "core/workspace.h"
#include "cpu/backward/args.h"
#include "cpu/backward/run.h"
#include "cpu/pool.h"
#include "cpu/simd/kernels.h"
#include "cpu/tiles.h"

namespace tessera::cpu {
namespace {

// Tasks that a round should have: enough for a few cores to finish together. A constant, so that
// sums are cut the same way on every machine; below it, heads of a group and then keys are split.
constexpr int64_t kTasksWanted = 16;
constexpr int64_t kMaxSplit = kMaxChunks;
constexpr int64_t kMinKeysOfChunk = 512;  // below, reading a partial dq costs over 1 % of making it

// Everything that shapes decide, and the slices of the workspace; with a null workspace those are
// null and only their bytes count.
struct Layout {
  BackwardArgs args{};
  CallSequence* sequences = nullptr;
  Interval *owned_q = nullptr, *owned_k = nullptr;
  uint8_t* used_pages = nullptr;
  int64_t used_pages_bytes = 0;
  bool round_per_sequence = false, round_per_head = false;
  char* scratch = nullptr;
  int64_t scratch_bytes = 0;  // of a worker
  int64_t bytes = 0;

  Layout(const Problem& problem, int num_threads, void* workspace);

 private:
  void set_sizes(const Problem& problem, const Sizes& sizes);
  void set_bias_gradient(const Problem& problem, const Sizes& sizes);
  void set_parts(const Problem& problem, const Sizes& sizes);
  void take_workspace(const Problem& problem, const Sizes& sizes, void* workspace, int num_threads);
};

BiasGradient bias_gradient_of(const Problem& p, const Sizes& sizes) {
  if (!given(p, TESSERA_DBIAS)) return BiasGradient::kNone;
  const Tensor& bias = p.tensor[TESSERA_DBIAS];
  if (bias.extent[3] == 1) return BiasGradient::kRows;
  if (bias.extent[2] == 1) return BiasGradient::kKeys;
  const bool summed =
      (bias.extent[0] == 1 && sizes.batch > 1) || (bias.extent[1] == 1 && sizes.hq > 1);
  if (!summed) return BiasGradient::kStore;
  return bias.dtype == TESSERA_FP32 ? BiasGradient::kAdd : BiasGradient::kBlock;
}

Layout::Layout(const Problem& problem, int num_threads, void* workspace) {
  const Sizes sizes = sizes_of(problem);
  set_sizes(problem, sizes);
  set_bias_gradient(problem, sizes);
  set_parts(problem, sizes);
  take_workspace(problem, sizes, workspace, num_threads);
}

// Queries that the band lets a block of keys see, in strips; kernels hold as many.
int64_t strips_seen(const Problem& problem, const BackwardArgs& args) {
  const Kernels& level = kernels();
  const int64_t all = (args.bound_q + level.strip - 1) / level.strip;
  const auto band = band_rule_of<int64_t>(problem);
  if (band.window.left < 0 || band.window.right < 0) return all;
  const int64_t reach = std::min(band.window.left, args.bound_q + args.bound_k) +
                        std::min(band.window.right, args.bound_q + args.bound_k);
  const int64_t tiles = (level.block + reach + kBackwardTile - 1) / kBackwardTile + 1;
  return std::min(all, tiles * kBackwardTile / level.strip);
}

void Layout::set_sizes(const Problem& problem, const Sizes& sizes) {
  args.call.batch = sizes.batch;
  args.call.hq = sizes.hq, args.call.hk = sizes.hk, args.call.group = sizes.group();
  args.call.dqk = sizes.dqk, args.call.dv = sizes.dv;
  args.call.q.dtype = problem.tensor[TESSERA_Q].dtype;
  args.call.o.dtype = problem.tensor[TESSERA_O].dtype;
  args.d_o.dtype = problem.tensor[TESSERA_DO].dtype;
  args.call.has_dropout = has(problem, TESSERA_DROPOUT);
  args.call.softcap = has(problem, TESSERA_SOFTCAP) ? 1.0f : 0.0f;
  args.packed_q = is_thd_q(problem), args.packed_k = is_thd_k(problem);
  args.bound_q = sizes.sq, args.bound_k = sizes.sk;
  if (args.packed_q && has(problem, TESSERA_MAX_SEQLEN_Q)) {
    args.bound_q = std::min(args.bound_q, problem.max_seqlen_q);
  }
  if (args.packed_k && has(problem, TESSERA_MAX_SEQLEN_K)) {
    args.bound_k = std::min(args.bound_k, problem.max_seqlen_k);
  }
  args.held_strips = strips_seen(problem, args);
  args.strip_slots = strip_slots_of(args.packed_q, sizes.batch, sizes.sq, kernels().strip);
  args.key_slots = args.packed_k ? sizes.sk : (Count{sizes.batch} * sizes.sk).value();
}

void Layout::set_bias_gradient(const Problem& problem, const Sizes& sizes) {
  const Tensor& bias = problem.tensor[TESSERA_DBIAS];
  args.bias_gradient = bias_gradient_of(problem, sizes);
  std::copy_n(bias.extent, 4, args.bias_extent);
  args.bias_over_sequences = bias.extent[0] == 1;
  args.bias_over_heads = bias.extent[1] == 1;
  args.has_starts = given(problem, TESSERA_Q_START) || given(problem, TESSERA_K_START);
  if (args.bias_gradient == BiasGradient::kAdd) {
    round_per_sequence = args.bias_over_sequences;
    round_per_head = args.bias_over_heads;
  }
}

// Heads of a group, and then keys, are split until there are tasks enough.
void Layout::set_parts(const Problem& problem, const Sizes& sizes) {
  args.parts = args.chunks = 1;
  if (is_paged(problem)) return;
  const Count tasks = Count{round_per_sequence ? 1 : sizes.batch} * (round_per_head ? 1 : sizes.hk);
  const int64_t wanted = Count{kTasksWanted}.pieces(std::max<int64_t>(tasks.value(), 1)).value();
  if (!round_per_head) {
    args.parts = static_cast<int>(std::min({sizes.group(), wanted, kMaxSplit}));
  }
  const int64_t chunks = std::min(wanted / args.parts, args.bound_k / kMinKeysOfChunk);
  args.chunks = static_cast<int>(std::clamp<int64_t>(chunks, 1, kMaxSplit));
}

void Layout::take_workspace(const Problem& problem, const Sizes& sizes, void* workspace,
                            int num_threads) {
  Workspace pieces(workspace);
  const auto take = [&]<typename T>(T*& place, Count count) {
    if (0 < count) place = pieces.take<T>(count, 64);
  };
  const Kernels& level = kernels();
  take(sequences, sizes.batch);
  take(owned_q, sizes.batch);
  take(owned_k, sizes.batch);
  const Count hq = sizes.hq, hk = sizes.hk;
  const Count dq_floats = hq * args.strip_slots * level.strip;
  take(args.dq_parts, args.chunks > 1 ? args.chunks * dq_floats * gradient_rows(sizes.dqk) : 0);
  const Count key_rows = args.parts > 1 ? args.parts * hk * args.key_slots : 0;
  take(args.dk_parts, key_rows * sizes.dqk);
  take(args.dv_parts, key_rows * sizes.dv);
  if (is_paged(problem)) {
    const Tensor &k = problem.tensor[TESSERA_K], &v = problem.tensor[TESSERA_V];
    args.pool_rows_k = (Count{k.extent[0]} * k.extent[1]).value();
    args.pool_rows_v = (Count{v.extent[0]} * v.extent[1]).value();
    used_pages_bytes = std::max(k.extent[0], v.extent[0]);
    take(used_pages, used_pages_bytes);
    take(args.dk_pool, hk * args.pool_rows_k * sizes.dqk);
    take(args.dv_pool, hk * args.pool_rows_v * sizes.dv);
  }
  take(args.bias_keys, args.bias_gradient == BiasGradient::kKeys ? hq * args.key_slots : 0);
  take(args.bias_rows, args.bias_gradient == BiasGradient::kRows ? args.chunks * dq_floats : 0);
  take(args.slope_parts,
       given(problem, TESSERA_DALIBI_SLOPES) ? args.chunks * hq * sizes.batch : 0);
  take(args.sink_parts, given(problem, TESSERA_DSINK) ? hq * sizes.batch : 0);
  scratch_bytes = level.backward_scratch_bytes(args);
  take(scratch, Count{scratch_bytes} * num_threads_or_default(num_threads));
  bytes = pieces.bytes();
}

// Zeros in every element of a tensor's extent, if it is not added to. Rows of the last axis are
// dense where a tensor has four.
void zero_tensor(const Problem& problem, const Buffers& buffers, int index) {
  if (!given(problem, index) || has(problem, TESSERA_ACCUMULATE)) return;
  Tensor t = problem.tensor[index];
  const int rank = tensor_rule(index).rank;
  for (int axis = rank; axis < 4; ++axis) t.extent[axis] = 1, t.stride[axis] = 0;
  const int64_t size = size_of(t.dtype);
  char* data = static_cast<char*>(buffers.data[index]);
  parallel_for(buffers, t.extent[0] * t.extent[1], [&](int64_t task, int) {
    for (int64_t c = 0; c < t.extent[2]; ++c) {
      const int64_t at = offset_of(t, task / t.extent[1], task % t.extent[1], c);
      std::memset(data + at * size, 0, static_cast<size_t>(t.extent[3] * size));
    }
  });
}

// True if every query of the extents sees every key, so that tasks reach all of dbias.
bool all_visible(const Problem& p) {
  for (int index : {TESSERA_MASK, TESSERA_KEY_RANGES, TESSERA_SEGMENT_IDS_Q, TESSERA_SEQLENS_Q,
                    TESSERA_SEQLENS_K, TESSERA_CU_SEQLENS_Q, TESSERA_CU_SEQLENS_K}) {
    if (given(p, index)) return false;
  }
  return !has_band(p);
}

// True if a row of a pool belongs to two keys that some query may see. Marks the pages in used, a
// byte each.
bool shares_pages(const Problem& problem, const Buffers& buffers, const Layout& layout, int table) {
  if (!given(problem, table)) return false;
  const Tensor& t = problem.tensor[table];
  const int64_t page_size = problem.tensor[TESSERA_K].extent[1];
  std::memset(layout.used_pages, 0, static_cast<size_t>(layout.used_pages_bytes));
  for (int64_t n = 0; n < layout.args.call.batch; ++n) {
    const Interval seen = layout.sequences[n].band.keys();
    if (seen.empty()) continue;
    for (int64_t place = seen.lo / page_size; place * page_size < seen.hi; ++place) {
      const int32_t page = static_cast<const int32_t*>(buffers.data[table])[offset_of(t, n, place)];
      if (layout.used_pages[page]++ != 0) return true;
    }
  }
  return false;
}

// The element at `at` of a gradient = sum, or += it.
void put_sum(const Problem& problem, const Buffers& buffers, int index, int64_t at, double sum) {
  const int32_t dtype = problem.tensor[index].dtype;
  void* data = buffers.data[index];
  if (has(problem, TESSERA_ACCUMULATE)) sum += load_element(data, at, dtype);
  store_element(data, at, dtype, sum);
}

// dsink[h] and dalibi_slopes[b or 1, h] from their parts, in order.
void reduce_heads(const Problem& problem, const Buffers& buffers, const BackwardArgs& args) {
  const int64_t batch = args.call.batch;
  for (int64_t h = 0; given(problem, TESSERA_DSINK) && h < args.call.hq; ++h) {
    double sum = 0;
    for (int64_t n = 0; n < batch; ++n) sum += args.sink_parts[h * batch + n];
    const Tensor& t = problem.tensor[TESSERA_DSINK];
    put_sum(problem, buffers, TESSERA_DSINK, offset_of(t, h), sum);
  }
  const Tensor& t = problem.tensor[TESSERA_DALIBI_SLOPES];
  for (int64_t a = 0; given(problem, TESSERA_DALIBI_SLOPES) && a < t.extent[0]; ++a) {
    const bool all = t.extent[0] == 1;
    for (int64_t h = 0; h < args.call.hq; ++h) {
      double sum = 0;
      for (int64_t n = all ? 0 : a; n < (all ? batch : a + 1); ++n) {
        for (int64_t c = 0; c < args.chunks; ++c) {
          sum += args.slope_parts[(c * args.call.hq + h) * batch + n];
        }
      }
      put_sum(problem, buffers, TESSERA_DALIBI_SLOPES, offset_of(t, a, h), sum);
    }
  }
}

// dbias with one row or one column from its parts, in order; a task is a plane of it.
void reduce_bias(const Problem& problem, const Buffers& buffers, const BackwardArgs& args) {
  const Call& call = args.call;
  const Tensor& t = problem.tensor[TESSERA_DBIAS];
  const bool by_keys = args.bias_gradient == BiasGradient::kKeys;
  const int64_t strip = kernels().strip;
  parallel_for(buffers, t.extent[0] * t.extent[1], [&](int64_t plane, int) {
    const int64_t a = plane / t.extent[1], b = plane % t.extent[1];
    const int64_t n_begin = args.bias_over_sequences ? 0 : a;
    const int64_t n_end = args.bias_over_sequences ? call.batch : a + 1;
    const int64_t h_begin = args.bias_over_heads ? 0 : b;
    const int64_t h_end = args.bias_over_heads ? call.hq : b + 1;
    const bool one = !by_keys && t.extent[2] == 1;  // summed over the rows too
    const int64_t extent = by_keys ? t.extent[3] : t.extent[2];
    for (int64_t e = 0; e < extent; ++e) {
      double sum = 0;
      for (int64_t n = n_begin; n < n_end; ++n) {
        const CallSequence& sequence = call.sequences[n];
        const int64_t length = by_keys ? sequence.band.len_k : sequence.band.len_q;
        const int64_t own = e - (by_keys ? sequence.dense_k : sequence.dense_q);  // e, of it
        const int64_t begin = one ? 0 : std::max<int64_t>(own, 0);
        for (int64_t i = begin; i < (one ? length : std::min(own + 1, length)); ++i) {
          for (int64_t h = h_begin; h < h_end; ++h) {
            if (by_keys) {
              sum += args.bias_keys[h * args.key_slots + key_slot(args, sequence) + i];
              continue;
            }
            const int64_t slot = strip_slot(args, sequence, static_cast<int>(strip));
            for (int64_t c = 0; c < args.chunks; ++c) {
              const int64_t head = (c * call.hq + h) * args.strip_slots;
              sum += args.bias_rows[(head + slot) * strip + i];
            }
          }
        }
      }
      const int64_t at = by_keys ? offset_of(t, a, b, 0, e) : offset_of(t, a, b, e, 0);
      put_sum(problem, buffers, TESSERA_DBIAS, at, sum);
    }
  });
}

void resolve(const Problem& problem, const Buffers& buffers, Layout& layout) {
  BackwardArgs& args = layout.args;
  args.call = make_call(problem, buffers, layout.sequences);
  args.d_o = rows_of(problem, buffers, TESSERA_DO);
  args.dq = rows_of(problem, buffers, TESSERA_DQ);
  args.dk = rows_of(problem, buffers, TESSERA_DK);
  args.dv = rows_of(problem, buffers, TESSERA_DV);
  args.dlse = strided_of(problem, buffers, TESSERA_DLSE);
  args.dbias = strided_of(problem, buffers, TESSERA_DBIAS);
  for (int64_t n = 0; n < args.call.batch; ++n) {
    layout.owned_q[n] = owned_rows_q(problem, buffers, n);
    layout.owned_k[n] = is_paged(problem) ? Interval{0, 0} : owned_rows_k(problem, buffers, n);
  }
  args.owned_q = layout.owned_q, args.owned_k = layout.owned_k;
  if (is_paged(problem)) {
    args.shared_pages = shares_pages(problem, buffers, layout, TESSERA_PAGE_TABLE_K) ||
                        shares_pages(problem, buffers, layout, TESSERA_PAGE_TABLE_V);
    layout.round_per_sequence |= args.shared_pages;
  }
}

// Queries x keys of all heads, were every key seen.
int64_t pairs_at_most(const Call& call) {
  Count pairs = 0;
  for (int64_t n = 0; n < call.batch; ++n) {
    pairs += Count{call.sequences[n].band.len_q} * call.sequences[n].band.len_k;
  }
  return (pairs * call.hq).value();
}

}  // namespace

int64_t backward_workspace_bytes(const Problem& problem, int num_threads) {
  return has_no_rows(problem) ? 0 : Layout(problem, num_threads, nullptr).bytes;
}

void run_backward(const Problem& problem, const Buffers& given_buffers) {
  Buffers buffers = given_buffers;
  if (has_no_rows(problem)) {
    for (int i = 0; i < TESSERA_NUM_TENSORS; ++i) {
      if (is_output(problem, i)) zero_tensor(problem, buffers, i);
    }
    return;
  }
  Layout layout(problem, buffers.num_threads, buffers.workspace);
  BackwardArgs& args = layout.args;
  resolve(problem, buffers, layout);
  const Call& call = args.call;
  const int64_t pairs = pairs_at_most(call);
  if (Count{pairs} * (3 * call.dqk + 2 * call.dv) < kSerialProducts) buffers.num_threads = 1;
  const auto run = [&](BackwardPhase phase, int64_t tasks) {
    parallel_for(buffers, tasks, [&](int64_t task, int worker) {
      kernels().backward(args, phase, task, layout.scratch + worker * layout.scratch_bytes);
    });
  };

  // What the tasks do not reach.
  const bool empty = call.batch == 0;
  if (empty) zero_tensor(problem, buffers, TESSERA_DQ);
  if (empty || is_paged(problem)) {
    zero_tensor(problem, buffers, TESSERA_DK);
    zero_tensor(problem, buffers, TESSERA_DV);
  }
  if (empty || args.bias_gradient == BiasGradient::kAdd ||
      (args.bias_gradient == BiasGradient::kStore && !all_visible(problem))) {
    zero_tensor(problem, buffers, TESSERA_DBIAS);
  }
  if (args.shared_pages) {
    const auto zero = [&](float* pool, int64_t floats) {
      constexpr int64_t kPiece = 1 << 18;
      parallel_for(buffers, (floats + kPiece - 1) / kPiece, [&](int64_t piece, int) {
        const int64_t begin = piece * kPiece, count = std::min(kPiece, floats - begin);
        std::memset(pool + begin, 0, static_cast<size_t>(count) * sizeof(float));
      });
    };
    zero(args.dk_pool, args.pool_rows_k * call.hk * call.dqk);
    zero(args.dv_pool, args.pool_rows_v * call.hk * call.dv);
  }

  // Rounds: all at once, unless tasks of several sequences or heads add to the same elements.
  const int64_t sequences = layout.round_per_sequence ? 1 : std::max<int64_t>(call.batch, 1);
  const int64_t heads = layout.round_per_head ? 1 : call.hk;
  for (int64_t n = 0; n < call.batch; n += sequences) {
    args.sequence_begin = n, args.sequence_end = n + sequences;
    for (int64_t h = 0; h < call.hk; h += heads) {
      args.head_begin = h, args.head_end = h + heads;
      run(BackwardPhase::kMain, args.chunks * sequences * heads * args.parts);
    }
  }
  args.sequence_begin = 0, args.sequence_end = call.batch;
  if (args.chunks > 1 && args.dq.data) {
    run(BackwardPhase::kReduceQ, call.batch * call.hq * kReduceParts);
  }
  if (args.parts > 1) run(BackwardPhase::kReduceKv, call.batch * call.hk * kReduceParts);
  if (args.shared_pages) run(BackwardPhase::kStorePages, call.hk * kReduceParts);
  if (args.bias_gradient == BiasGradient::kBlock && !empty) {
    const int64_t block = kernels().block, blocks = (args.bias_extent[3] + block - 1) / block;
    run(BackwardPhase::kBiasBlock, args.bias_extent[0] * args.bias_extent[1] * blocks);
  }
  if (args.bias_gradient == BiasGradient::kKeys || args.bias_gradient == BiasGradient::kRows) {
    reduce_bias(problem, buffers, args);
  }
  reduce_heads(problem, buffers, args);
}

}  // namespace tessera::cpu
