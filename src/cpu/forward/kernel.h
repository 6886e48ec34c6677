// SPDX-License-Identifier: Apache-2.0
// The forward pass of one instruction set: tiled online softmax.
//
//   for each block of keys that some row of the tile sees:
//     for each strip of queries that sees some of it:
//       S^T   = K Q^T                                  (forward/tile.h)
//       S^T   = base-2 logits, hidden ones -inf        (score/score.h; a plain product has nothing
//                                                       to do here)
//       m'    = max(m, rows of S^T),   alpha = exp2(m - m')
//       P^T   = exp2(S^T - m'),        l     = alpha l + sum of P^T
//       P^T   = 0 where dropped                        (score/dropout.h)
//       O^T   = alpha O^T + V^T P^T                    (forward/tile.h)
//   o = O^T / l (with the sink), lse = ln 2 (m + log2 l)    (forward/finish.h)
//
// Everything vertical is a lane of its own, so a row's bits do not depend on its neighbours: not on
// the tile, the thread or the layout. Blocks begin at multiples of kBlock for the same reason.
#pragma once

#include "cpu/forward/finish.h"
#include "cpu/forward/matrix.h"
#include "cpu/forward/scratch.h"
#include "cpu/forward/tile.h"
#include "cpu/score/dropout.h"

namespace tessera::cpu {
namespace {

template <int N>
struct Constant {
  static constexpr int value = N;
};

// f(Constant<vectors>{}), for 1 or 2.
template <typename S, typename F>
TESSERA_INLINE void by_vectors(int vectors, F f) {
  if constexpr (S::kNarrow) {
    f(Constant<1>{});
  } else {
    vectors == 1 ? f(Constant<1>{}) : f(Constant<2>{});
  }
}

// ---- softmax of one strip over one block ----

// P^T = exp2(c S^T - m') in place, or as pairs of bf16 for kPairs; m, l and alpha follow. Sums go
// to four partial sums by key index, so that how the block is trimmed changes no bit.
template <typename S, int N, bool kPairs, bool kDrop>
__attribute__((noinline)) void exponentiate(float c, const Visible<S>& visible,
                                            const uint32_t (*keep)[Tile<S>::kStrip],
                                            const float* maximum, float* scores, uint32_t* pairs,
                                            float* m, float* l, float* alpha) {
  constexpr int L = S::kLanes;
  using F = typename S::F;
  const F scale = S::set1(c), nothing = S::set1(-kInfinity);
  const F lowest = S::set1(kHiddenScore * kLog2e);
  for (int v = 0; v < N; ++v) {
    const F before = S::load(m + v * L);
    // Scores up to `lowest` are -inf. A row whose maximum is above it gives them no weight; for
    // one whose maximum is not, a base of 0 does that.
    const F top = S::max(S::mul(scale, S::load(maximum + v * L)), before);
    const auto sees = S::less(lowest, top);
    const F now = S::select(sees, top, nothing), base = S::select(sees, top, S::zero());
    const F shrink = S::exp2(S::sub(before, base));
    F sum[4] = {S::zero(), S::zero(), S::zero(), S::zero()};
    const auto weight = [&](int j, F& total) {
      const F x = S::fms(S::load(scores + (j * N + v) * L), scale, base);
      const F p = kPairs ? S::exp2_fast(x) : S::exp2(x);
      total = S::add(total, p);
      if constexpr (kDrop) {
        const auto word = S::load(reinterpret_cast<const int32_t*>(keep[j / 32] + v * L));
        return S::select(S::test_bit(word, S::set1i(keep_bit(j))), p, S::zero());
      } else {
        return p;
      }
    };
    const auto put = [&](int j, F even, F odd) {
      if constexpr (kPairs) {
        S::store_pairs(pairs + (j / 2 * N + v) * L, S::make_pairs(even, odd));
      } else {
        S::store(scores + (j * N + v) * L, even);
        S::store(scores + ((j + 1) * N + v) * L, odd);
      }
    };
    const int last = visible.end[v];
    int j = visible.begin[v];
    for (; j + 4 <= last; j += 4) {
      F p[4];
      TESSERA_UNROLL
      for (int u = 0; u < 4; ++u) p[u] = weight(j + u, sum[u]);
      put(j, p[0], p[1]);
      put(j + 2, p[2], p[3]);
    }
    if (j < last) {
      const F p0 = weight(j, sum[0]);
      put(j, p0, j + 1 < last ? weight(j + 1, sum[1]) : S::zero());
    }
    if (j + 2 < last) put(j + 2, weight(j + 2, sum[2]), S::zero());
    const F total = S::add(S::add(sum[0], sum[1]), S::add(sum[2], sum[3]));
    S::store(l + v * L, S::fma(S::load(l + v * L), shrink, total));
    S::store(m + v * L, now);
    S::store(alpha + v * L, shrink);
  }
}

// S^T of a run.
template <typename S, typename Product, int N>
void multiply(const Call& call, const Block<S>& block, const float* q_t, bool maximum,
              const Run& run, ForwardScratch<S>& scratch) {
  constexpr int L = S::kLanes;
  using Word = typename Product::Word;
  const auto* q = reinterpret_cast<const Word*>(q_t) + run.vector * L;
  auto* kernel = multiply_keys<S, Product, N, N, false>;
  if (maximum) kernel = multiply_keys<S, Product, N, N, true>;
  if (!run.all) kernel = multiply_keys<S, Product, 1, N, false>;
  kernel(block.k_rows, block.k_ahead(), q, call.dqk, run.first, run.last,
         scratch.scores + run.vector * L, scratch.maximum);
}

// Which of the tile's strips this is.
struct Part {
  int index, count;
};

// O^T = alpha O^T + V^T P^T of a run over all head dims. Scratch has whole groups of 16 of them.
template <typename S, int N, int kOf>
void accumulate(const Block<S>& block, Part part, int64_t dv, const float* p, int first, int last,
                const float* alpha, float* o_t) {
  constexpr int kRows = S::kNarrow ? 16 : S::kRows;
  const ValueRows values{block.v_rows};
  Ahead ahead = block.v_ahead();
  const auto rows_from = [&](int64_t d, auto rows) {
    accumulate_values<S, Fp32Product<S>, rows.value, N, kOf>(values, ahead, d, p, first, last,
                                                             alpha, o_t);
  };
  int64_t d = 0;
  for (; d + kRows <= dv; d += kRows) {
    if (!S::kNarrow && N == kOf) block.prefetch_part(part.index * dv + d, part.count * dv, kRows);
    rows_from(d, Constant<kRows>{});
  }
  for (; d + 4 <= dv; d += 4) rows_from(d, Constant<4>{});
  for (; d < dv; ++d) rows_from(d, Constant<1>{});
}
template <typename S, int N, int kOf>
void accumulate_pairs(const Block<S>& block, Part part, int64_t dv, const uint32_t* p, int first,
                      int last, const float* alpha, float* o_t) {
  constexpr int kRows = S::kNarrow ? 16 : S::kRows;
  const ValuePairs values{block.v_pairs, block.v_stride};
  Ahead ahead = block.v_ahead();
  for (int64_t d = 0; d < dv; d += kRows) {
    if (!S::kNarrow && N == kOf) block.prefetch_part(part.index * dv + d, part.count * dv, kRows);
    accumulate_values<S, Bf16Product<S>, kRows, N, kOf>(values, ahead, d, p, first / 2,
                                                        (last + 1) / 2, alpha, o_t);
  }
}
template <typename S, int N, int kOf>
void accumulate_run(const ForwardArgs& args, Part part, const Run& run, ForwardScratch<S>& scratch,
                    Strip<S>& strip) {
  const int64_t at = run.vector * S::kLanes;
  if (args.shape.bf16) {
    if constexpr (S::kHasBf16Dot && !S::kNarrow) {
      accumulate_pairs<S, N, kOf>(scratch.block, part, args.call.dv, scratch.p_pairs + at,
                                  run.first, run.last, scratch.alpha + at, strip.o_t + at);
    }
  } else {
    accumulate<S, N, kOf>(scratch.block, part, args.call.dv, scratch.scores + at, run.first,
                          run.last, scratch.alpha + at, strip.o_t + at);
  }
  for (int v = 0; v < N; ++v) S::store(scratch.alpha + at + v * S::kLanes, S::set1(1.0f));
}

// True if products are base-2 logits but for a factor, and all of them count.
template <typename S>
TESSERA_INLINE bool is_plain(const Call& call, const Visible<S>& visible) {
  return call.raw && visible.full && (visible.last - visible.first) % S::kRows == 0;
}

// S, then P.
template <typename S, int N>
void weigh(const ForwardArgs& args, const CallSequence& sequence, const Run* runs, int num_runs,
           ForwardScratch<S>& scratch, Strip<S>& strip) {
  const Call& call = args.call;
  const Visible<S>& visible = scratch.visible;
  const Block<S>& block = scratch.block;
  const bool plain = is_plain(call, visible);

  // S = Q K^T
  if constexpr (S::kHasTiles) {
    const int first = visible.first, last = visible.last;
    multiply_key_tiles<S, N>(block, strip.q_t, first, last, scratch.scores);
    if (plain) find_maximum<S, N>(scratch.scores, first, last, scratch.maximum);
  } else {
    for (int r = 0; r < num_runs; ++r) {
      if (args.shape.bf16) {
        if constexpr (S::kHasBf16Dot && !S::kNarrow) {
          multiply<S, Bf16Product<S>, N>(call, block, strip.q_t, plain, runs[r], scratch);
        }
      } else {
        multiply<S, Fp32Product<S>, N>(call, block, strip.q_t, plain, runs[r], scratch);
      }
    }
  }
  if (!plain) {
    finish_scores<S, N>(call, sequence, strip.rows, block.keys, visible, scratch.scores,
                        scratch.maximum, nullptr);
  }

  // P = exp2(S - m), l += P
  const float c = call.raw ? call.scale_log2 : 1.0f;
  const auto softmax = [&](auto* kernel) {
    kernel(c, visible, scratch.keep, scratch.maximum, scratch.scores, scratch.p_pairs, strip.m,
           strip.l, scratch.alpha);
  };
  if (S::kHasTiles || args.shape.bf16) {
    if constexpr (S::kHasBf16Dot && !S::kNarrow) {
      softmax(call.has_dropout ? exponentiate<S, N, true, true> : exponentiate<S, N, true, false>);
    }
  } else {
    softmax(call.has_dropout ? exponentiate<S, N, false, true> : exponentiate<S, N, false, false>);
  }
}

template <typename S, int N>
void attend(const ForwardArgs& args, const CallSequence& sequence, Part part,
            ForwardScratch<S>& scratch, Strip<S>& strip) {
  const Call& call = args.call;
  const Visible<S>& visible = scratch.visible;
  const Block<S>& block = scratch.block;
  const int first = visible.first, last = visible.last;
  Run runs[3];
  const int num_runs = find_runs<S, N>(visible, runs);

  if (call.has_dropout) {
    fill_keep_bits<S, N>(call, sequence, strip.rows, block.keys, first, last, scratch.keep);
  }
  weigh<S, N>(args, sequence, runs, num_runs, scratch, strip);
  if constexpr (S::kHasTiles) {
    block.prefetch_part(part.index, part.count, 1);
    accumulate_tiles<S, N>(block, visible, call.dv, scratch.p_pairs, scratch.alpha, strip.o_t);
  } else {
    for (int r = 0; r < num_runs; ++r) {
      if (runs[r].all) {
        accumulate_run<S, N, N>(args, part, runs[r], scratch, strip);
      } else {
        accumulate_run<S, 1, N>(args, part, runs[r], scratch, strip);
      }
    }
  }
}

// The same for one or two rows, with head dims in the lanes: see decode/dot.h.
template <typename S>
void attend_dots(const Call& call, const CallSequence& sequence, int64_t kv_head,
                 ForwardScratch<S>& scratch, Strip<S>& strip) {
  const Visible<S>& visible = scratch.visible;
  const Block<S>& block = scratch.block;
  const int first = visible.first, last = visible.last;
  if (call.has_dropout) {
    fill_keep_bits<S, 1>(call, sequence, strip.rows, block.keys, first, last, scratch.keep);
  }
  for (int r = 0; r < strip.rows.count; ++r) {
    by_dtype(call.k.dtype, [&](auto element) {
      dot_keys<S, decltype(element)>(block.k_rows, block.k_ahead(), strip.q_t + r * block.k_stride,
                                     call.dqk, r, first, last, scratch.scores);
    });
  }
  finish_scores<S, 1>(call, sequence, strip.rows, block.keys, visible, scratch.scores,
                      scratch.maximum, nullptr);
  auto* softmax =
      call.has_dropout ? exponentiate<S, 1, false, true> : exponentiate<S, 1, false, false>;
  softmax(call.raw ? call.scale_log2 : 1.0f, visible, scratch.keep, scratch.maximum, scratch.scores,
          scratch.p_pairs, strip.m, strip.l, scratch.alpha);
  const float scale = scale_of(call.v_scale, sequence, kv_head);
  for (int r = 0; r < strip.rows.count; ++r) {
    by_dtype(call.v.dtype, [&](auto element) {
      add_all_values<S, decltype(element)>(block, scratch.scores, scale, scratch.alpha[r], r, first,
                                           last, call.dv, strip.o + r * decode_step(call.dv));
    });
  }
}

// f(Constant<R>{}): the rows of decode/group.h that take a strip's.
template <typename S, typename F>
TESSERA_INLINE void by_rows(const Strip<S>& strip, F f) {
  strip.rows.count <= 4 ? f(Constant<4>{}) : f(Constant<8>{});
}

// The same for up to eight rows of bf16: see decode/group.h.
template <typename S, int R>
void attend_group(const Call& call, const CallSequence& sequence, int64_t kv_head,
                  ForwardScratch<S>& scratch, Strip<S>& strip) {
  const Visible<S>& visible = scratch.visible;
  Block<S>& block = scratch.block;
  const int first = visible.first, last = visible.last;
  const int end = static_cast<int>(first + round_up(last - first, 8));
  const auto widen = [&](const Rows& rows, int64_t head_dim, const char** table) {
    widen_fp8_rows<S>(rows.dtype, block.zeros, head_dim, first, end, table, scratch.widened,
                      round_up(head_dim, 32));
  };
  const bool plain = is_plain(call, visible);
  auto* multiply = plain ? multiply_group<S, R, true> : multiply_group<S, R, false>;
  widen(call.k, call.dqk, block.k_rows);
  multiply(block.k_rows, block.k_ahead(), call.k.dtype == TESSERA_BF16,
           reinterpret_cast<const Bf16*>(strip.q_t), scale_of(call.k_scale, sequence, kv_head),
           call.dqk, first, last, scratch.scores, scratch.maximum);
  if (!plain) {
    finish_scores<S, 1>(call, sequence, strip.rows, block.keys, visible, scratch.scores,
                        scratch.maximum, nullptr);
  }
  if (call.has_dropout) {
    fill_keep_bits<S, 1>(call, sequence, strip.rows, block.keys, first, last, scratch.keep);
  }
  auto* softmax =
      call.has_dropout ? exponentiate<S, 1, true, true> : exponentiate<S, 1, true, false>;
  softmax(call.raw ? call.scale_log2 : 1.0f, visible, scratch.keep, scratch.maximum, scratch.scores,
          scratch.p_pairs, strip.m, strip.l, scratch.alpha);
  widen(call.v, call.dv, block.v_rows);
  add_group<S, R>(block.v_rows, block.v_ahead(), call.v.dtype == TESSERA_BF16, scratch.p_pairs,
                  scratch.alpha, call.dv, first / 2, (last + 1) / 2, strip.o);
}

// q of the rows that attend_dots takes, as fp32.
template <typename S>
void widen_queries(const Call& call, const CallSequence& sequence, int64_t kv_head, int64_t step,
                   const StripRows<S>& rows, float* q) {
  const float scale = scale_of(call.k_scale, sequence, kv_head);
  for (int r = 0; r < rows.count; ++r) {
    const char* row = call.q.data + sequence.batch_q * call.q.batch +
                      (sequence.first_q + rows.token[r]) * call.q.row + rows.head[r] * call.q.head;
    convert_row<S>(row, call.q.dtype, call.dqk, scale, q + r * step);
  }
}

// ---- tasks ----

// Rows of the task's sequence and kv head together, if they are packed; they decide how it is
// computed. The tile's own would not do: how rows are cut into tiles depends on the threads.
TESSERA_INLINE int64_t packed_rows(const Call& call, const ForwardTask& task) {
  const bool packed = task.kind == ForwardTask::kSplit || task.kind == ForwardTask::kMerge;
  return packed ? call.sequences[task.sequence].band.len_q * call.group : INT64_MAX;
}

// How a strip is computed.
enum class Way { kStrips, kDots, kGroup };
template <typename S>
TESSERA_INLINE Way way_of(const ForwardArgs& args, const ForwardTask& task) {
  if (S::kHasTiles || args.shape.uniform) return Way::kStrips;
  if (kDecodesGroups<S> && args.shape.widens_fp8) return Way::kGroup;
  if (packed_rows(args.call, task) <= kDotRows) return Way::kDots;
  return kDecodesGroups<S> && args.shape.bf16 ? Way::kGroup : Way::kStrips;
}

// The rows of a tile's strips, those of a kv head together; returns how many strips there are.
template <typename S>
int lay_strips(const Call& call, const CallSequence& sequence, const ForwardTask& task,
               Strip<S>* strips) {
  constexpr int kStrip = Tile<S>::kStrip;
  int count = 0;
  const bool packed = task.kind != ForwardTask::kTile;
  for (int64_t h = 0; h < (packed ? task.kv_heads : task.heads); ++h) {
    for (int64_t begin = 0; begin < task.count; begin += kStrip) {
      StripRows<S>& rows = strips[count++].rows;
      const int n = static_cast<int>(smaller<int64_t>(task.count - begin, kStrip));
      for (int l = 0; l < n; ++l) {
        const int64_t r = task.begin + begin + l;
        rows.token[l] = packed ? r / call.group : r;
        rows.head[l] = task.head + (packed ? h * call.group + r % call.group : h);
      }
      rows.resolve(call, sequence, n);
    }
  }
  return count;
}

// Q as the strip's way of computing wants it, and O = 0.
template <typename S>
void begin_strip(const ForwardArgs& args, const CallSequence& sequence, int64_t kv_head, Way way,
                 Strip<S>& strip) {
  const Call& call = args.call;
  for (int l = 0; l < Tile<S>::kStrip; ++l) strip.m[l] = -kInfinity, strip.l[l] = 0;
  const int64_t lanes = strip.rows.vectors * S::kLanes;
  memset(strip.o_t, 0, static_cast<size_t>(round_up(call.dv, 16) * lanes) * 4);
  if (way != Way::kStrips) {
    memset(strip.o, 0, static_cast<size_t>(kDecodeRows<S> * decode_step(call.dv)) * 4);
  }
  if (way == Way::kDots) {
    widen_queries(call, sequence, kv_head, round_up(call.dqk, 16), strip.rows, strip.q_t);
  } else if (way == Way::kGroup) {
    if constexpr (kDecodesGroups<S>) {
      by_rows(strip, [&](auto r) {
        pack_group<S, r.value>(call, sequence, strip.rows, reinterpret_cast<Bf16*>(strip.q_t));
      });
    }
  } else if (strip.rows.key_end > 0) {
    by_vectors<S>(strip.rows.vectors, [&](auto n) {
      pack_queries<S, n.value>(call, sequence, strip.rows, args.shape.bf16, strip.q_t);
      if constexpr (S::kHasTiles) {  // zeros up to whole tiles
        const int64_t begin = (call.dqk + 1) / 2 * lanes, end = round_up(call.dqk, 32) / 2 * lanes;
        memset(strip.q_t + begin, 0, static_cast<size_t>(end - begin) * 4);
      }
    });
  }
}

// O^T of a strip that kept rows of O, which of groups still want the scale of V.
template <typename S>
void transpose_rows_of_o(const Call& call, const CallSequence& sequence, int64_t kv_head, Way way,
                         Strip<S>& strip) {
  const int64_t step = decode_step(call.dv);
  const bool group = way == Way::kGroup;
  const float scale = group ? scale_of(call.v_scale, sequence, kv_head) : 1.0f;
  for (int64_t d = 0; d < call.dv; ++d) {
    const int64_t from = group ? column_of(d) : d;
    for (int r = 0; r < strip.rows.count; ++r) {
      strip.o_t[d * S::kLanes + r] = scale * strip.o[r * step + from];
    }
  }
}

// One kv head's turn at a block of keys: its strips, of which there are `count`.
template <typename S>
void attend_block(const ForwardArgs& args, const CallSequence& sequence, const ForwardTask& task,
                  Turn turn, Way way, int count, Strip<S>* strips, ForwardScratch<S>& scratch) {
  const Call& call = args.call;
  Block<S>& block = scratch.block;
  const int64_t kv_head = turn.head();
  bool ready = false;
  for (int s = 0; s < count; ++s) {
    Strip<S>& strip = strips[s];
    if (!find_visible(call, strip.rows, block.keys, scratch.visible)) continue;
    if (!ready) {
      block.point_at_rows(call, sequence, turn);
      block.point_ahead(call, sequence, turn);
      if (call.mask_by_key) {
        block.forget_hidden_keys(call, sequence, task.head + turn.index * call.group, task.heads);
      }
      if constexpr (S::kHasTiles) {
        pack_tiles(call, block);
      } else if (way == Way::kStrips) {
        block.convert(call, sequence, args.shape, kv_head, count);
      }
      ready = true;
    }
    if (way == Way::kDots) {
      attend_dots(call, sequence, kv_head, scratch, strip);
    } else if (way == Way::kGroup) {
      if constexpr (kDecodesGroups<S>) {
        by_rows(strip,
                [&](auto r) { attend_group<S, r.value>(call, sequence, kv_head, scratch, strip); });
      }
    } else {
      by_vectors<S>(strip.rows.vectors, [&](auto n) {
        attend<S, n.value>(args, sequence, Part{s, count}, scratch, strip);
      });
    }
  }
}

// Adds partial b to a, in lanes. An empty one (m = -inf, l = 0, O = 0) changes no bit of a.
template <typename S>
void merge_strip(int64_t dv, int vectors, Strip<S>& a, const Strip<S>& b) {
  constexpr int L = S::kLanes;
  for (int v = 0; v < vectors; ++v) {
    const auto m_a = S::load(a.m + v * L), m_b = S::load(b.m + v * L);
    const auto m = S::max(m_b, m_a);
    const auto base = S::select(S::equal(m, S::set1(-kInfinity)), S::zero(), m);
    const auto w_a = S::exp2(S::sub(m_a, base)), w_b = S::exp2(S::sub(m_b, base));
    S::store(a.m + v * L, m);
    S::store(a.l + v * L, S::fma(S::load(b.l + v * L), w_b, S::mul(S::load(a.l + v * L), w_a)));
    for (int64_t d = 0; d < dv; ++d) {
      const int64_t k = (d * vectors + v) * L;
      S::store(a.o_t + k, S::fma(S::load(b.o_t + k), w_b, S::mul(S::load(a.o_t + k), w_a)));
    }
  }
}

// Adds the strips' m, l and O^T to those of scratch.sum, and begins them anew; the first time there
// is nothing to add to. An empty chunk changes no bit.
template <typename S>
void add_chunks(const ForwardArgs& args, int count, int64_t chunk, ForwardScratch<S>& scratch) {
  for (int s = 0; s < count; ++s) {
    Strip<S>& strip = scratch.strips[s];
    Strip<S> sum;
    place_state(args.shape, s, scratch.sum, sum);
    const auto bytes = static_cast<size_t>(strip_state_floats<S>(args.call.dv).value()) * 4;
    if (chunk == 0) {
      memcpy(sum.m, strip.m, bytes);
    } else {
      merge_strip(args.call.dv, strip.rows.vectors, sum, strip);
    }
    memset(strip.m, 0, bytes);
    for (int l = 0; l < Tile<S>::kStrip; ++l) strip.m[l] = -kInfinity;
  }
}

template <typename S>
void run_tile(const ForwardArgs& args, const ForwardTask& task, ForwardScratch<S>& scratch) {
  constexpr int kBlock = Tile<S>::kBlock;
  const Call& call = args.call;
  const CallSequence& sequence = call.sequences[task.sequence];
  const int count = lay_strips(call, sequence, task, scratch.strips);
  const int of_head = count / task.kv_heads;
  const Way way = way_of<S>(args, task);
  Turn turn{task.head / call.group, 0, task.kv_heads};
  int64_t begin = INT64_MAX, end = 0;
  for (int s = 0; s < count; ++s) {
    Strip<S>& strip = scratch.strips[s];
    turn.index = s / of_head;
    if (task.partial >= 0) {
      const int64_t partial = task.partial + turn.index * task.partial_step;
      auto* state = reinterpret_cast<float*>(args.partials + partial * args.partial_bytes);
      place_state(args.shape, s % of_head, state, strip);
    } else {
      place_state(args.shape, s, scratch.state, strip);
    }
    begin_strip(args, sequence, turn.head(), way, strip);
    begin = smaller(begin, strip.rows.key_begin), end = larger(end, strip.rows.key_end);
  }
  begin = larger(begin, task.key_begin), end = smaller(end, task.key_end);

  // The batch-invariant form puts chunks of keys together as kMerge does, wherever rows are cut.
  constexpr int64_t kChunk = int64_t{kSplitBlocks} * kBlock;
  const bool sums = args.shape.uniform && task.partial < 0 && (end - 1) / kChunk > begin / kChunk;
  int64_t chunks = 0;
  scratch.block.begin_walk();
  for (int64_t n0 = begin / kBlock * kBlock; n0 < end && !interrupted(call); n0 += kBlock) {
    if (sums && n0 % kChunk == 0 && n0 > begin) add_chunks(args, count, chunks++, scratch);
    scratch.block.keys.resolve(call, sequence, n0);
    for (turn.index = 0; turn.index < turn.heads; ++turn.index) {
      attend_block(args, sequence, task, turn, way, of_head, scratch.strips + turn.index * of_head,
                   scratch);
    }
  }
  if (sums) add_chunks(args, count, chunks, scratch);
  for (int s = 0; s < count; ++s) {
    Strip<S>& strip = scratch.strips[s];
    if (sums) place_state(args.shape, s, scratch.sum, strip);
    turn.index = s / of_head;
    if (way != Way::kStrips) transpose_rows_of_o(call, sequence, turn.head(), way, strip);
    if (task.partial >= 0) continue;
    by_vectors<S>(strip.rows.vectors,
                  [&](auto n) { finish_strip<S, n.value>(call, sequence, strip); });
  }
}

template <typename S>
void run_merge(const ForwardArgs& args, const ForwardTask& task, ForwardScratch<S>& scratch) {
  const Call& call = args.call;
  const CallSequence& sequence = call.sequences[task.sequence];
  const int count = lay_strips(call, sequence, task, scratch.strips);
  const auto state_of = [&](int64_t partial) {
    return reinterpret_cast<float*>(args.partials + (task.partial + partial) * args.partial_bytes);
  };
  for (int s = 0; s < count; ++s) {
    Strip<S>& strip = scratch.strips[s];
    place_state(args.shape, s, state_of(0), strip);
    for (int64_t p = 1; p < task.partials; ++p) {
      Strip<S> other;
      place_state(args.shape, s, state_of(p), other);
      merge_strip(call.dv, strip.rows.vectors, strip, other);
    }
    by_vectors<S>(strip.rows.vectors,
                  [&](auto n) { finish_strip<S, n.value>(call, sequence, strip); });
  }
}

// True if a row of o and lse holds a part that a call adds to, -inf being none.
TESSERA_INLINE bool holds_row(const Call& call, int64_t batch, int64_t head, int64_t row) {
  float lse;
  memcpy(&lse, at(call.lse, batch, head, row), sizeof lse);
  return lse != -kInfinity;
}

TESSERA_INLINE void run_fill(const Call& call, const ForwardTask& task) {
  const float nothing = -kInfinity;
  const int64_t size = call.o.dtype == TESSERA_FP32 ? 4 : 2;
  for (int64_t row = task.begin; row < task.begin + task.count; ++row) {
    for (int64_t h = 0; h < call.hq; ++h) {
      if (call.adds && holds_row(call, task.sequence, h, row)) continue;
      memset(call.o.data + task.sequence * call.o.batch + row * call.o.row + h * call.o.head, 0,
             static_cast<size_t>(call.dv * size));
      if (call.lse.data) {
        memcpy(const_cast<char*>(at(call.lse, task.sequence, h, row)), &nothing, sizeof nothing);
      }
    }
  }
}

template <typename S>
void run_task(const ForwardArgs& args, const ForwardTask& task, char* memory) {
  ForwardScratch<S>* scratch = nullptr;
  lay_out<S>(args.shape, memory, &scratch);
  if (task.kind == ForwardTask::kMerge) return run_merge(args, task, *scratch);
  ForwardTask chunk = task;
  run_tile(args, chunk, *scratch);
  for (int64_t c = 1; c < task.chunks; ++c) {
    chunk.key_begin = chunk.key_end, chunk.key_end += task.key_end - task.key_begin;
    ++chunk.partial;
    run_tile(args, chunk, *scratch);
  }
}

template <typename S>
void forward_task(const ForwardArgs& args, int64_t index, char* memory) {
  const ForwardTask& task = args.tasks[index];
  if (task.kind == ForwardTask::kFill) return run_fill(args.call, task);
  using Narrow = typename S::Narrow;
  const bool few = !args.shape.uniform && packed_rows(args.call, task) <= Narrow::kLanes;
  if constexpr (S::kHasTiles) {
    if (few || !args.shape.bf16) return S::below().forward(args, index, memory);
    S::begin_tiles();
    run_task<S>(args, task, memory);
    S::end_tiles();
  } else {
    if (Narrow::kNarrow && few) return run_task<Narrow>(args, task, memory);
    run_task<S>(args, task, memory);
  }
}

}  // namespace
}  // namespace tessera::cpu
