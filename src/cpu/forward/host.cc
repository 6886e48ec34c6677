// SPDX-License-Identifier: Apache-2.0
// Host side of the forward pass: cuts the problem into tasks, longest first, and runs them.
//
// A sequence of more than kSplitTokens queries is cut into tiles of queries; one of fewer (decode)
// is packed over the heads of a group and cut along its keys, in chunks of a fixed size that are
// merged in order. Which of the two depends on the sequence alone, and so do a row's bits. In the
// batch-invariant form a row's bits do not depend on the call's other queries either, so that a
// prompt may be cut anywhere: all rows take strips of full width, and tiles of queries put the same
// chunks of keys together in the same order.
#include <algorithm>
#include <bit>
#include <limits>

#include "core/count.h"
#include "core/mask/sequence.h"
#include "cpu/forward/args.h"
#include "cpu/forward/run.h"
#include "cpu/pool.h"
#include "cpu/simd/kernels.h"
#include "cpu/tiles.h"

namespace tessera::cpu {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0 ? 1 : 0); }

// Sizes of everything, from shapes and the number of workers alone.
struct Layout {
  Sizes sizes;
  const Kernels* level;
  int workers;
  int64_t tile_m, chunk;
  int64_t turns = 1, chunks = 1;  // kv heads and chunks of a split, at most
  ForwardShape shape;
  int64_t partial_bytes, scratch_bytes;

  // Offsets into the workspace.
  int64_t tasks_at, partials_at, scratch_at, bytes;
};

// How a task of split keys is cut: kv heads that lie beside each other, and chunks that follow each
// other, since memory is best read in its order; but so that every worker has several tasks.
void group_splits(const Problem& problem, int64_t splits_of_a_head, Layout& out) {
  const Sizes& s = out.sizes;
  const Tensor &k = problem.tensor[TESSERA_K], &v = problem.tensor[TESSERA_V];
  const Count block = (Count{s.dqk} * size_of(k.dtype) + Count{s.dv} * size_of(v.dtype)) *
                      (out.shape.uniform ? out.level->block : out.level->decode_block);
  const auto tasks = [&](int64_t turns) {
    return (Count{splits_of_a_head} * ceil_div(s.hk, turns)).value();
  };
  if (k.stride[2] == s.dqk && v.stride[2] == s.dv) {
    out.turns = kMostTurns;
    while (out.turns > 1 && (out.turns / 2 >= s.hk || kTurnsBytes < 2 * block * out.turns ||
                             tasks(out.turns) < 4 * out.workers)) {
      out.turns /= 2;
    }
  }
  out.chunks = std::clamp<int64_t>(tasks(out.turns) / (8 * out.workers), 1, kMostChunks);
}

bool shares_sets(const Tensor& rows) {
  return rows.dtype == TESSERA_FP32 && rows.stride[1] * size_of(rows.dtype) % kSpreadBytes == 0;
}

Layout lay_out(const Problem& problem, int num_threads) {
  Layout out{};
  const Sizes s = out.sizes = sizes_of(problem);
  const Kernels& level = kernels();
  out.level = &level;
  out.workers = num_threads_or_default(num_threads);
  const int64_t batch = s.batch, group = s.group();

  // Enough tiles for every worker to have several, so that the last ones even out.
  const int64_t rows = (Count{s.sq} * s.hq * (is_thd_q(problem) ? 1 : batch)).value();
  out.tile_m = forward_tile_m(s.dqk, s.dv);
  while (out.tile_m > level.strip && rows / out.tile_m < 4 * out.workers) out.tile_m /= 2;
  out.tile_m = std::max<int64_t>(out.tile_m, level.strip);
  out.chunk = kSplitBlocks * level.block;

  const bool bf16 = level.has_bf16_dot && problem.tensor[TESSERA_Q].dtype == TESSERA_BF16 &&
                    problem.tensor[TESSERA_K].dtype == TESSERA_BF16 &&
                    problem.tensor[TESSERA_V].dtype == TESSERA_BF16;
  const auto is_few_bits = [&](int index) {
    const int32_t dtype = problem.tensor[index].dtype;
    return is_fp8(dtype) || dtype == TESSERA_BF16;
  };
  const bool widens_fp8 = !bf16 && level.has_bf16_dot && has_byte_tables() &&
                          problem.tensor[TESSERA_Q].dtype == TESSERA_BF16 &&
                          is_few_bits(TESSERA_K) && is_few_bits(TESSERA_V);
  out.shape = {.dqk = s.dqk,
               .dv = s.dv,
               .rows = out.tile_m,
               .convert_k = !bf16 && problem.tensor[TESSERA_K].dtype != TESSERA_FP32,
               .convert_v = bf16 || problem.tensor[TESSERA_V].dtype != TESSERA_FP32,
               .spread_k = shares_sets(problem.tensor[TESSERA_K]),
               .spread_v = shares_sets(problem.tensor[TESSERA_V]),
               .bf16 = bf16,
               .widens_fp8 = widens_fp8,
               .decodes = false,
               .uniform = has(problem, TESSERA_BATCH_INVARIANT)};

  // Bounds over all lengths that the extents admit.
  const auto pieces = [batch](bool thd, int64_t extent, int64_t size) {
    return thd ? Count{extent / size} + batch : Count{batch} * ceil_div(extent, size);
  };
  const bool thd_q = is_thd_q(problem);
  Count tasks = s.hq * pieces(thd_q, s.sq, out.tile_m) + pieces(thd_q, s.sq, kFillRows) +
                2 * Count{batch},
        partials = 0;
  if (batch == 0) tasks = ceil_div(s.sq, kFillRows);
  const bool may_be_short = thd_q || given(problem, TESSERA_SEQLENS_Q) || s.sq <= kSplitTokens;
  if (may_be_short && batch > 0) {
    const int64_t packed = (Count{group} * std::min(s.sq, kSplitTokens)).value();
    const Count row_tiles = Count{s.hk} * ceil_div(packed, out.tile_m);
    partials = row_tiles * pieces(is_thd_k(problem), s.sk, out.chunk);
    tasks += partials + 2 * row_tiles * batch;
    ForwardShape split = out.shape;
    split.rows = std::min(packed, out.tile_m);
    out.partial_bytes = level.forward_partial_bytes(split);
    group_splits(problem, partials.value() / s.hk, out);
    out.shape.rows =
        std::max(out.tile_m, out.turns * ceil_div(split.rows, level.strip) * level.strip);
    out.shape.decodes = true;
  }
  const Count scratch = Count{level.forward_scratch_bytes(out.shape)}.up_to(64);
  const Count tasks_at = (Count{batch} * int64_t{sizeof(CallSequence)}).up_to(64);
  const Count partials_at = tasks_at + (tasks * int64_t{sizeof(ForwardTask)}).up_to(64);
  const Count scratch_at = partials_at + partials * out.partial_bytes;
  out.scratch_bytes = scratch.value();
  out.tasks_at = tasks_at.value();
  out.partials_at = partials_at.value();
  out.scratch_at = scratch_at.value();
  out.bytes = (scratch_at + scratch * out.workers).value();
  return out;
}

// Calls emit(task, cost) for every task of the call; cost in scores, 0 for what must come last.
template <typename Emit>
class TaskList {
 public:
  TaskList(const Problem& problem, const Buffers& buffers, const Layout& layout, const Call& call,
           Emit emit)
      : problem_(problem), buffers_(buffers), layout_(layout), call_(call), emit_(emit) {}

  void all() {
    // A packed buffer has rows to zero even without sequences; a padded one has none.
    if (call_.batch == 0 && is_thd_q(problem_)) fill(0, {0, layout_.sizes.sq});
    for (int64_t n = 0; n < call_.batch; ++n) {
      const CallSequence& sequence = call_.sequences[n];
      const int64_t len_q = sequence.band.len_q;
      const Interval owned = owned_rows_q(problem_, buffers_, n);
      if (len_q == 0) {
        fill(sequence.batch_q, owned);
        continue;
      }
      fill(sequence.batch_q, {owned.lo, sequence.first_q});
      fill(sequence.batch_q, {sequence.first_q + len_q, owned.hi});
      if (len_q <= kSplitTokens) {
        split(sequence);
      } else {
        tile(sequence);
      }
    }
  }

 private:
  void fill(int64_t batch, Interval rows) {
    for (int64_t begin = rows.lo; begin < rows.hi; begin += kFillRows) {
      ForwardTask task{};
      task.kind = ForwardTask::kFill;
      task.sequence = static_cast<int32_t>(batch);
      task.begin = begin, task.count = std::min(rows.hi - begin, kFillRows);
      emit_(task, task.count * call_.hq);
    }
  }

  // Short sequences put the heads of a group into one tile, for the sake of its prepared blocks.
  void tile(const CallSequence& sequence) {
    const int64_t len_q = sequence.band.len_q, strip = layout_.level->strip;
    const int64_t tokens = std::min(ceil_div(len_q, strip) * strip, layout_.tile_m);
    const int64_t heads = std::min(layout_.tile_m / tokens, call_.group);
    for (int64_t h = 0; h < call_.hq; h += step(h, heads)) {
      for (int64_t begin = 0; begin < len_q; begin += tokens) {
        ForwardTask task = rows_of_task(ForwardTask::kTile, sequence, h, step(h, heads), begin,
                                        std::min(len_q - begin, tokens));
        const Band& band = sequence.band;
        const Interval top = band.row(begin), bottom = band.row(begin + task.count - 1);
        const int64_t keys =
            std::max<int64_t>(top.hi - top.lo, 0) + std::max<int64_t>(bottom.hi - bottom.lo, 0);
        emit_(task, task.count * task.heads * keys / 2 + 1);
      }
    }
  }
  // Heads of a tile that begins at head h, inside h's group.
  int64_t step(int64_t h, int64_t heads) const {
    return std::min(heads, call_.group - h % call_.group);
  }

  // Chunk by chunk over all heads, whose keys are neighbours in most layouts.
  void split(const CallSequence& sequence) {
    const int64_t rows = sequence.band.len_q * call_.group;
    const Interval keys = sequence.band.keys(0, sequence.band.len_q);
    const int64_t first = keys.lo / layout_.chunk;
    const int64_t chunks = keys.empty() ? 0 : ceil_div(keys.hi, layout_.chunk) - first;
    const int64_t tiles = ceil_div(rows, layout_.tile_m);
    const int64_t base = next_partial_;
    if (chunks > 1) next_partial_ += call_.hk * tiles * chunks;
    const auto each_tile = [&](int64_t kv_heads, auto body) {
      for (int64_t h = 0; h < call_.hk; h += kv_heads) {
        for (int64_t tile = 0; tile < tiles; ++tile) {
          const int64_t begin = tile * layout_.tile_m;
          ForwardTask task =
              rows_of_task(ForwardTask::kSplit, sequence, h * call_.group, call_.group, begin,
                           std::min(rows - begin, layout_.tile_m));
          task.kv_heads = static_cast<int32_t>(std::min(kv_heads, call_.hk - h));
          task.partial_step = tiles * chunks;
          body(task, base + (h * tiles + tile) * chunks);
        }
      }
    };
    if (chunks <= 1) {
      each_tile(layout_.turns, [&](const ForwardTask& task, int64_t) {
        emit_(task, task.count * task.kv_heads * (keys.hi - keys.lo) + 1);
      });
      return;
    }
    for (int64_t c = 0; c < chunks; c += layout_.chunks) {
      each_tile(layout_.turns, [&](ForwardTask task, int64_t partial) {
        task.key_begin = (first + c) * layout_.chunk;
        task.key_end = task.key_begin + layout_.chunk;
        task.chunks = std::min(chunks - c, layout_.chunks);
        task.partial = partial + c;
        emit_(task, task.count * task.kv_heads * task.chunks * layout_.chunk);
      });
    }
    each_tile(1, [&](ForwardTask task, int64_t partial) {
      task.kind = ForwardTask::kMerge;
      task.partial = partial, task.partials = chunks;
      emit_(task, 0);
    });
  }

  static ForwardTask rows_of_task(ForwardTask::Kind kind, const CallSequence& sequence,
                                  int64_t head, int64_t heads, int64_t begin, int64_t count) {
    return {.kind = kind,
            .sequence = static_cast<int32_t>(sequence.n),
            .head = static_cast<int32_t>(head),
            .heads = static_cast<int32_t>(heads),
            .kv_heads = 1,
            .begin = begin,
            .count = count,
            .key_begin = 0,
            .key_end = std::numeric_limits<int64_t>::max(),
            .chunks = 1,
            .partial = -1,
            .partial_step = 0,
            .partials = 0};
  }

  const Problem& problem_;
  const Buffers& buffers_;
  const Layout& layout_;
  const Call& call_;
  Emit emit_;
  int64_t next_partial_ = 0;
};

// Descending in cost, in steps of an eighth; merges (cost 0) last.
constexpr int kBuckets = 512;
int bucket_of(int64_t cost) {
  if (cost <= 0) return kBuckets - 1;
  const auto c = static_cast<uint64_t>(cost);
  const int width = std::bit_width(c);
  const int eighth = static_cast<int>(width > 3 ? c >> (width - 4) & 7 : c << (4 - width) & 7);
  return kBuckets - 2 - (width * 8 + eighth) % (kBuckets - 1);
}

struct Order {
  int64_t parallel;  // tasks before the merges
  int64_t tasks;
  int64_t cost;  // scores of all
};

Order fill_tasks(const Problem& problem, const Buffers& buffers, const Layout& layout,
                 const Call& call, ForwardTask* tasks) {
  int64_t next[kBuckets + 1] = {};
  Order order{};
  const auto walk = [&](auto emit) {
    TaskList<decltype(emit)>(problem, buffers, layout, call, emit).all();
  };
  walk([&](const ForwardTask&, int64_t cost) {
    ++next[bucket_of(cost) + 1];
    order.cost += cost;
  });
  for (int b = 0; b < kBuckets; ++b) next[b + 1] += next[b];
  order.parallel = next[kBuckets - 1], order.tasks = next[kBuckets];
  walk([&](const ForwardTask& task, int64_t cost) { tasks[next[bucket_of(cost)]++] = task; });
  return order;
}

// The largest of no score, in every head.
void clear_max_logit(const Problem& problem, const Buffers& buffers) {
  const Strided max_logit = strided_of(problem, buffers, TESSERA_MAX_LOGIT);
  if (!max_logit.data) return;
  for (int64_t h = 0; h < problem.tensor[TESSERA_MAX_LOGIT].extent[0]; ++h) {
    *reinterpret_cast<float*>(max_logit.data + h * max_logit.stride[0]) =
        -std::numeric_limits<float>::infinity();
  }
}

}  // namespace

int64_t forward_workspace_bytes(const Problem& problem, int num_threads) {
  return has_no_rows(problem) ? 0 : lay_out(problem, num_threads).bytes;
}

Status run_forward(const Problem& problem, const Buffers& buffers) {
  clear_max_logit(problem, buffers);
  if (has_no_rows(problem)) return {};
  const Layout layout = lay_out(problem, buffers.num_threads);
  char* workspace = static_cast<char*>(buffers.workspace);
  ForwardArgs args{};
  args.call = make_call(problem, buffers, reinterpret_cast<CallSequence*>(workspace));
  args.shape = layout.shape;
  auto* tasks = reinterpret_cast<ForwardTask*>(workspace + layout.tasks_at);
  args.tasks = tasks;
  args.partials = workspace + layout.partials_at;
  args.partial_bytes = layout.partial_bytes;

  const Order order = fill_tasks(problem, buffers, layout, args.call, tasks);

  Buffers threads = buffers;
  if (order.cost * (layout.sizes.dqk + layout.sizes.dv) < kSerialProducts) threads.num_threads = 1;
  char* scratch = workspace + layout.scratch_at;
  const auto run = [&](int64_t begin, int64_t end) {
    if (begin == end) return;
    parallel_for(threads, end - begin, [&](int64_t task, int worker) {
      layout.level->forward(args, begin + task, scratch + worker * layout.scratch_bytes);
    });
  };
  run(0, order.parallel);
  run(order.parallel, order.tasks);
  return {};
}

}  // namespace tessera::cpu
