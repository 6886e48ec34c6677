// SPDX-License-Identifier: Apache-2.0
// The backward pass of one instruction set: a main task, and the reductions after it. With x as in
// score/score.h and everything laid out as S^T (keys in rows, queries in lanes):
//
//   S^T  = K Q^T                       dP^T = V dO^T
//   P^T  = exp2((x - lse) log2(e))     dX^T = P^T * (dropped dP^T - delta)
//   dV  += dropped P^T dO              dS^T = dX^T * softcap'        (times the scale at the end)
//   dK  += dS^T Q                      dQ^T += K^T dS^T
//
//        for each head of the group
//          for each block of keys                K, V stay in L2, and so do dK, dV
//            for each tile of queries            that may see some of it; copied at its first block
//              for each strip                    S, dP, P, dS in L1; dQ^T
//              dV, dK
//            dK, dV rounded once, or added to the sums
//            dQ^T of strips that no later block concerns transposed, rounded once
//
// Every sum is fp32 and in an order that shapes alone decide.
#pragma once

#include "cpu/backward/bias.h"
#include "cpu/backward/matrix.h"
#include "cpu/backward/rows.h"
#include "cpu/score/dropout.h"

namespace tessera::cpu {
namespace {

template <int kVec>
struct Vectors {
  static constexpr int kCount = kVec;
};

template <typename S, bool kPairs, typename T>
class Backward : BackwardRows<S, kPairs, T> {
  using Base = BackwardRows<S, kPairs, T>;
  using Base::args_, Base::call_, Base::x_, Base::sequence_, Base::head_, Base::part_, Base::keys_;
  using Base::ask_ahead, Base::ahead_, Base::prepared_, Base::blocks_of_chunk,
      Base::strips_of_chunk, Base::place_of;
  using Base::dq_part, Base::slot, Base::store_dq, Base::flush_key;
  using Base::first_of_group_, Base::last_of_group_, Base::keys_ready_;
  using Base::prepare_strips, Base::prepare_keys, Base::prepare_queries;
  using Base::zero_keys_outside, Base::zero_queries_outside, Base::sink_, Base::sink_sum_;
  using typename Base::F;
  using typename Base::Word;
  static constexpr int L = Base::L, R = Base::R, W = Base::W, B = Base::B, M = Base::M;
  static constexpr int kPerWord = Base::kPerWord;

 public:
  using Base::reduce_q_task, Base::reduce_kv_task, Base::store_pages_task;

  Backward(const BackwardArgs& args, char* scratch) : Base(args, scratch) {}

  void main_task(int64_t task) {
    const int64_t part = task % args_.parts;
    task /= args_.parts;
    const int64_t heads = args_.head_end - args_.head_begin;
    const int64_t head_k = args_.head_begin + task % heads;
    task /= heads;
    const int64_t sequences = args_.sequence_end - args_.sequence_begin;
    sequence_ = &call_.sequences[args_.sequence_begin + task % sequences];
    const int64_t chunk = task / sequences;
    const int64_t g0 = call_.group * part / args_.parts;
    const int64_t g1 = call_.group * (part + 1) / args_.parts;
    for (int64_t g = g0; g < g1; ++g) {
      first_of_group_ = g == g0, last_of_group_ = g + 1 == g1;
      head_task(head_k * call_.group + g, chunk, part);
    }
    if (args_.parts == 1 && chunk == 0 && !call_.k_pages.table) zero_keys_outside(head_k);
    if constexpr (S::kStreams) S::end_streams();
  }

  // A block of keys of one [sq, sk] plane of dbias: every sequence and head that shares the plane
  // is computed again (2 of the 5 products), a tile of queries at a time, so that the sum is fp32.
  void bias_block_task(int64_t task) {
    in_bias_block_ = true;
    const Strided& bias = args_.dbias;
    const int64_t blocks = pad_to(args_.bias_extent[3], B) / B;
    const int64_t n0 = task % blocks * B;
    task /= blocks;
    const int64_t plane_head = task % args_.bias_extent[1], plane = task / args_.bias_extent[1];
    const int64_t n_begin = args_.bias_over_sequences ? 0 : plane;
    const int64_t n_end = args_.bias_over_sequences ? call_.batch : plane + 1;
    const int64_t h_begin = args_.bias_over_heads ? 0 : plane_head;
    const int64_t h_end = args_.bias_over_heads ? call_.hq : plane_head + 1;
    const int keys = static_cast<int>(smaller<int64_t>(B, args_.bias_extent[3] - n0));
    for (int64_t m0 = 0; m0 < args_.bias_extent[2]; m0 += M) {
      clear<S>(x_.bias_tile, int64_t{M} * B);
      for (int64_t n = n_begin; n < n_end; ++n) {
        sequence_ = &call_.sequences[n];
        add_bias_part(m0, n0, h_begin, h_end);
      }
      const float scale = call_.bias_pre_scale ? call_.softmax_scale : 1.0f;
      const int rows = static_cast<int>(smaller<int64_t>(M, args_.bias_extent[2] - m0));
      for (int i = 0; i < rows; ++i) {
        char* row = const_cast<char*>(at(bias, plane, plane_head, m0 + i, n0));
        const auto store = [&](auto* to) {
          store_row<S>(to, x_.bias_tile + i * B, nullptr, scale, keys, call_.adds);
        };
        if (bias.dtype == TESSERA_BF16) {
          store(reinterpret_cast<Bf16*>(row));
        } else {
          store(reinterpret_cast<Fp16*>(row));
        }
      }
    }
  }

 private:
  // What a sequence adds to the tile of a plane that begins at (m0, n0). Its own tiles begin there
  // too, unless it begins at another position: then up to four of them meet the plane's.
  void add_bias_part(int64_t m0, int64_t n0, int64_t h_begin, int64_t h_end) {
    const int64_t first_row = m0 - sequence_->dense_q, first_key = n0 - sequence_->dense_k;
    const bool apart = first_row % M != 0 || first_key % B != 0;
    bias_sum_ = apart ? x_.bias_part : x_.bias_tile;
    for (int64_t i0 = first_row - remainder(first_row, M); i0 < first_row + M; i0 += M) {
      if (i0 < 0 || i0 >= sequence_->band.len_q) continue;
      const int64_t strips = smaller<int64_t>(M, pad_to(sequence_->band.len_q - i0, W)) / W;
      for (int64_t j0 = first_key - remainder(first_key, B); j0 < first_key + B; j0 += B) {
        if (j0 < 0 || j0 >= sequence_->band.len_k) continue;
        if (apart) clear<S>(x_.bias_part, int64_t{M} * B);
        keys_.resolve(call_, *sequence_, j0);
        for (int64_t h = h_begin; h < h_end; ++h) {
          head_ = h;
          prepared_ = i0 / W;
          keys_ready_ = false;
          query_tile(i0, static_cast<int>(strips));
        }
        if (apart) add_shifted(i0 - first_row, j0 - first_key);
      }
    }
  }
  static int64_t remainder(int64_t x, int64_t of) { return (x % of + of) % of; }

  // bias_tile += bias_part, whose first element stands at (row, column) of it.
  void add_shifted(int64_t row, int64_t column) {
    for (int64_t i = larger<int64_t>(row, 0); i < smaller<int64_t>(row + M, M); ++i) {
      const float* from = x_.bias_part + (i - row) * B - column;
      float* to = x_.bias_tile + i * B;
      for (int64_t j = larger<int64_t>(column, 0); j < smaller<int64_t>(column + B, B); ++j) {
        to[j] += from[j];
      }
    }
  }

  // ---- a head ----

  void head_task(int64_t head, int64_t chunk, int64_t part) {
    head_ = head, part_ = part;
    const int64_t strips = pad_to(sequence_->band.len_q, W) / W;
    const Interval blocks = blocks_of_chunk(chunk), seen = strips_of_chunk(chunk);
    const bool whole = args_.chunks == 1, sinks = args_.sink_parts && chunk == 0;
    dq_ = whole ? x_.dq : dq_part(chunk);
    memset(x_.dq_begun, 0, static_cast<size_t>(args_.held_strips));
    prepared_ = sinks ? 0 : seen.lo, finished_ = whole ? 0 : seen.lo;
    sink_ = sinks ? load_scalar<S>(at(call_.sink, head), call_.sink.dtype) : 0.0f;
    sink_sum_ = 0;
    ahead_ = {0, smaller(seen.hi * W, sequence_->band.len_q), 0,
              smaller(blocks.hi * B, sequence_->band.len_k)};
    if (args_.bias_rows) clear<S>(x_.bias_rows, strips * W);
    for (int v = 0; v < kVectors; ++v) slope_[v] = S::zero();

    finish_strips(seen.lo);
    for (int64_t block = blocks.lo; block < blocks.hi; ++block) key_block(block * B);
    finish_strips(whole ? strips : seen.hi);
    if (sinks) prepare_strips(strips);

    if (args_.dq.data && whole) zero_queries_outside();
    if (args_.bias_rows) {
      float* to = args_.bias_rows + ((chunk * call_.hq + head) * args_.strip_slots + slot()) * W;
      memcpy(to, x_.bias_rows, static_cast<size_t>(strips * W) * sizeof(float));
    }
    if (args_.slope_parts) {
      args_.slope_parts[(chunk * call_.hq + head) * call_.batch + sequence_->n] =
          S::reduce_add(S::add(slope_[0], slope_[1]));
    }
    if (sinks) args_.sink_parts[head * call_.batch + sequence_->n] = sink_sum_;
  }

  float* dq_of(int64_t strip) const {
    const int64_t place = args_.chunks == 1 ? place_of(strip) : strip;
    return dq_ + place * gradient_rows(call_.dqk) * W;
  }

  // dq of the strips before `end`, which no later block of keys concerns.
  void finish_strips(int64_t end) {
    for (; finished_ < end && args_.dq.data; ++finished_) {
      float* dq = dq_of(finished_);
      const bool begun = finished_ < prepared_ && x_.dq_begun[place_of(finished_)];
      if (!begun) clear<S>(dq, gradient_rows(call_.dqk) * W);
      if (args_.chunks == 1) store_dq(finished_, dq, 0, 1);
    }
  }

  // ---- a block of keys ----

  void key_block(int64_t n0) {
    keys_.resolve(call_, *sequence_, n0);
    keys_ready_ = false;
    for (bool& begun : sums_begun_) begun = false;
    if (args_.bias_keys) clear<S>(x_.bias_keys, int64_t{B} * L);
    const Interval queries = sequence_->band.rows(n0, n0 + keys_.count);
    if (!queries.empty()) finish_strips(queries.lo / M * M / W);
    for (int64_t m0 = queries.lo / M * M; m0 < queries.hi; m0 += M) {
      query_tile(m0, static_cast<int>(smaller<int64_t>(M, pad_to(queries.hi - m0, W)) / W));
    }
    for (int j = 0; j < B; j += R) {
      if (sums_begun_[j / R]) continue;
      clear<S>(x_.dk + j * x_.dk_step, R * x_.dk_step);
      clear<S>(x_.dv + j * x_.dv_step, R * x_.dv_step);
    }
    for (int j = 0; j < keys_.count; ++j) {
      if (args_.dk.data) {
        flush_key(args_.dk, call_.k_pages, args_.dk_parts, args_.dk_pool, x_.dk_sum,
                  x_.dk + j * x_.dk_step, j, call_.dqk, call_.softmax_scale);
      }
      if (args_.dv.data) {
        flush_key(args_.dv, call_.v_pages, args_.dv_parts, args_.dv_pool, x_.dv_sum,
                  x_.dv + j * x_.dv_step, j, call_.dv, call_.dropout_scale);
      }
    }
    if (args_.bias_keys) {
      float* to = args_.bias_keys + head_ * args_.key_slots + key_slot(args_, *sequence_) + n0;
      for (int j = 0; j < keys_.count; ++j) to[j] = S::reduce_add(S::load(x_.bias_keys + j * L));
    }
  }

  // ---- a tile of queries ----

  void query_tile(int64_t m0, int strips) {
    if (interrupted(call_)) return;
    prepare_strips(m0 / W + strips);
    Visible<S> visible[M / W];
    bool seen[M / W];
    int first = B, last = 0;
    for (int t = 0; t < strips; ++t) {
      seen[t] = find_visible(call_, x_.rows[place_of(m0 / W) + t], keys_, visible[t]);
      if (!seen[t]) continue;
      if constexpr (8 % R != 0) {
        visible[t].first -= visible[t].first % R;  // the bits say that no lane sees what this adds
        for (int v = 0; v < kVectors; ++v) {
          visible[t].begin[v] = visible[t].first, visible[t].end[v] = visible[t].last;
        }
      }
      first = smaller(first, visible[t].first);
      last = larger(last, static_cast<int>(pad_to(visible[t].last, R)));
    }
    if (last == 0) return;
    if (S::kHasTiles) first = first / L * L, last = static_cast<int>(pad_to(last, L));
    if (!keys_ready_) prepare_keys();
    prepare_queries(m0, strips);
    for (int t = 0; t < strips; ++t) {
      if (seen[t]) {
        strip(m0, t, visible[t]);
        clear_columns(t, first, visible[t].first);
        clear_columns(t, static_cast<int>(pad_to(visible[t].last, 2)), last);
      } else {
        clear_columns(t, first, last);
      }
    }
    if (in_bias_block_) return;
    // The vectors that see each register tile of keys: those between the first and the last.
    Span span[B / R];
    for (int j = first; j < last; j += R) {
      Span& sees = span[j / R] = {strips * kVectors, 0};
      for (int t = 0; t < strips; ++t) {
        for (int v = 0; v < kVectors && seen[t]; ++v) {
          if (visible[t].begin[v] > j || visible[t].end[v] <= j) continue;
          sees = {smaller(sees.begin, t * kVectors + v), t * kVectors + v + 1};
        }
      }
    }
    if constexpr (S::kHasTiles) {
      if (args_.dv.data) {
        add_outer_tiles<S>(x_, x_.p, {x_.d_o, x_.do_step}, span, sums_begun_, first, last, call_.dv,
                           {x_.dv, x_.dv_step});
      }
      if (args_.dk.data) {
        add_outer_tiles<S>(x_, x_.ds, {x_.q, x_.q_step}, span, sums_begun_, first, last, call_.dqk,
                           {x_.dk, x_.dk_step});
      }
      mark_begun<S>(span, first, last, sums_begun_);
      return;
    }
    if (args_.dv.data) {
      add_outer(x_.p, x_.d_o, x_.do_step, span, first, last, call_.dv, x_.dv, x_.dv_step);
    }
    if (args_.dk.data) {
      add_outer(x_.ds, x_.q, x_.q_step, span, first, last, call_.dqk, x_.dk, x_.dk_step);
    }
    for (int j = first; j < last; j += R) {
      sums_begun_[j / R] |= span[j / R].begin < span[j / R].end;
    }
  }

  // sum[key][d] += sum_q weight[key][q] row[q][d], the first time without what sum held.
  void add_outer(const Word* weight, const Word* row, int64_t row_step, const Span* span, int first,
                 int last, int64_t dim, float* sum, int64_t sum_step) {
    constexpr int kWords = L / kPerWord;  // of a vector of queries
    const auto add = [&](auto vectors, int64_t d) {
      constexpr int kVec = decltype(vectors)::kCount;
      for (int j = first; j < last; j += R) {
        const Span sees = span[j / R];
        if (sees.begin >= sees.end) continue;
        auto* multiply = sums_begun_[j / R] ? multiply_tile<S, kVec, false, true, Word>
                                            : multiply_tile<S, kVec, false, false, Word>;
        multiply((sees.end - sees.begin) * kWords, weight + j * x_.p_step + sees.begin * kWords,
                 x_.p_step, row + sees.begin * kWords * row_step + d, row_step,
                 sum + j * sum_step + d, sum_step);
      }
    };
    int64_t d = 0;
    for (; d + L < dim; d += 2 * L) add(Vectors<2>{}, d);
    if (d < dim) add(Vectors<1>{}, d);
  }

  // ---- a strip of queries ----

  void strip(int64_t m0, int t, const Visible<S>& visible) {
    const int64_t index = place_of(m0 / W) + t;
    const StripRows<S>& rows = x_.rows[index];
    Run runs[3];
    const int num_runs = find_runs<S, kVectors>(visible, runs);
    const bool by_bias = args_.bias_gradient == BiasGradient::kBlock
                             ? in_bias_block_
                             : args_.bias_gradient != BiasGradient::kNone;
    const bool watched = call_.softcap > 0 || args_.slope_parts || by_bias;
    if (call_.has_dropout) {
      fill_keep_bits<S, kVectors>(call_, *sequence_, rows, keys_, visible.first, visible.last,
                                  keep_);
    }
    score(rows, t, visible, runs, num_runs);
    if (call_.has_dropout) {
      watched ? weigh<true, true>(index, t, visible) : weigh<true, false>(index, t, visible);
    } else {
      watched ? weigh<false, true>(index, t, visible) : weigh<false, false>(index, t, visible);
    }
    if (watched) watch(m0, t, rows, visible);
    if (!args_.dq.data || in_bias_block_) return;
    float* dq = dq_of(m0 / W + t);
    bool& begun = x_.dq_begun[index];
    if constexpr (S::kHasTiles) {
      add_dq_tiles<S>(x_, visible, t, call_.dqk, begun, dq);
      begun = true;
      return;
    }
    for (int r = 0; r < num_runs; ++r) {
      if (runs[r].all) add_dq<kVectors>(runs[r], t, begun, dq), begun = true;
    }
    if (!begun) clear<S>(dq, gradient_rows(call_.dqk) * W), begun = true;
    for (int r = 0; r < num_runs; ++r) {
      if (!runs[r].all) add_dq<1>(runs[r], t, true, dq);
    }
  }

  // x and dP.
  void score(const StripRows<S>& rows, int t, const Visible<S>& visible, const Run* runs,
             int num_runs) {
    const Word *q_t = x_.q_t + t * W * x_.qk_depth, *do_t = x_.do_t + t * W * x_.v_depth;
    if constexpr (S::kHasTiles) {
      for (int j = visible.first; j < visible.last; j += R) {
        prefetch_bias(rows, visible, j);
        ask_ahead();
      }
      multiply_key_tiles<S>(x_, visible, q_t, do_t);
    }
    for (int r = 0; r < num_runs; ++r) {
      const auto multiply = [&](auto vectors) {
        score_run<decltype(vectors)::kCount>(rows, visible, runs[r], q_t, do_t);
      };
      runs[r].all ? multiply(Vectors<kVectors>{}) : multiply(Vectors<1>{});
    }
    if (!(call_.raw && visible.full)) {
      float maximum[W];
      finish_scores<S, kVectors>(call_, *sequence_, rows, keys_, visible, x_.s, maximum,
                                 call_.softcap > 0 ? x_.cap : nullptr);
    }
    if (visible.last % 2) {  // rows go two by two: one that weighs nothing
      for (int v = 0; v < kVectors; ++v) {
        S::store(x_.s + visible.last * W + v * L, S::set1(-kInfinity));
        S::store(x_.dp + visible.last * W + v * L, S::zero());
      }
    }
  }

  // S and dP of a run's keys, which matrix tiles have made already. If one vector alone sees them the
  // other is hidden.
  template <int kVec>
  void score_run(const StripRows<S>& rows, const Visible<S>& visible, const Run& run,
                 const Word* q_t, const Word* do_t) {
    const int64_t at = run.vector * L;
    if constexpr (!S::kHasTiles) {
      for (int j = run.first; j < run.last; j += R) {
        prefetch_bias(rows, visible, j);
        ask_ahead();
        multiply_rows<S, kVec>(x_.qk_depth, x_.depth_piece, x_.k + j * x_.k_step, x_.k_step,
                               q_t + at, x_.s + j * W + at);
      }
      for (int j = run.first; j < run.last; j += R) {
        multiply_rows<S, kVec>(x_.v_depth, x_.depth_piece, x_.v + j * x_.v_step, x_.v_step,
                               do_t + at, x_.dp + j * W + at);
      }
    }
    if constexpr (kVec < kVectors) {
      const int64_t other = L - at;
      for (int j = run.first; j < run.last; ++j) {
        S::store(x_.s + j * W + other, S::set1(-kInfinity));
        S::store(x_.dp + j * W + other, S::zero());
        if (call_.softcap > 0) S::store(x_.cap + j * W + other, S::zero());
      }
    }
  }

  // dQ^T += K^T dS^T over a run's keys; if not begun, the first time.
  template <int kVec>
  void add_dq(const Run& run, int t, bool begun, float* dq) {
    const int64_t at = run.vector * L;
    const int first = run.first / kPerWord, last = (run.last + kPerWord - 1) / kPerWord;
    const Word* ds = x_.ds_pairs + first * x_.ds_pairs_step + t * W + at;
    auto* multiply = begun ? multiply_tile<S, kVec, true, true, Word>
                           : multiply_tile<S, kVec, true, false, Word>;
    for (int64_t d = 0; d < call_.dqk; d += R) {
      multiply(last - first, x_.k_pairs + first * x_.k_pairs_step + d, x_.k_pairs_step, ds,
               x_.ds_pairs_step, dq + d * W + at, W);
    }
  }

  // Asks for this step's share of the lines that a bias has for the strip: all at once they would
  // fill the queues that the products' own loads wait in.
  void prefetch_bias(const StripRows<S>& rows, const Visible<S>& visible, int j) const {
    const Strided& bias = call_.bias;
    if (!bias.data || bias.stride[3] == 0) return;
    const int steps = (visible.last - visible.first + R - 1) / R, step = (j - visible.first) / R;
    for (int l = W * step / steps; l < W * (step + 1) / steps; ++l) {
      const char* row = rows.bias[l] + keys_.n0 * bias.stride[3];
      const int64_t end = visible.last * bias.stride[3];
      for (int64_t byte = visible.first * bias.stride[3]; byte < end; byte += 64) {
        __builtin_prefetch(row + byte, 0, 2);
      }
    }
  }

  // P and dX from S and dP: into the tile's P and dS at once, or, if watched, P into the tile and
  // dX back into dp, for what looks at it first.
  template <bool kDropout, bool kWatched>
  __attribute__((noinline)) void weigh(int64_t index, int t, const Visible<S>& visible) {
    F lse[kVectors], delta[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      lse[v] = S::load(x_.lse + index * W + v * L);
      delta[v] = S::load(x_.delta + index * W + v * L);
    }
    const F scale = S::set1(call_.raw ? call_.softmax_scale : 1.0f), log2e = S::set1(kLog2e);
    const F dropout_scale = S::set1(call_.dropout_scale);
    for (int j = visible.first; j < visible.last; j += 2) {
      F p[2][kVectors], dx[2][kVectors];
      for (int u = 0; u < 2; ++u) {
        const auto bit = S::set1i(keep_bit(j + u));
        for (int v = 0; v < kVectors; ++v) {
          // x - lse is rounded when it is small already.
          const F above = S::fms(S::load(x_.s + (j + u) * W + v * L), scale, lse[v]);
          const F x = S::mul(above, log2e);
          F dp = S::load(x_.dp + (j + u) * W + v * L);
          // What is watched may be fp32, and not only rounded to pairs of bf16.
          F weight = kPairs && !kWatched ? S::exp2_fast(x) : S::exp2(x);
          F dropped = weight;
          if (kDropout) {
            const auto* word = reinterpret_cast<const int32_t*>(keep_[(j + u) / 32] + v * L);
            const auto kept = S::test_bit(S::load(word), bit);
            dropped = S::select(kept, weight, S::zero());
            dp = S::select(kept, dp, S::zero());
          }
          p[u][v] = dropped;
          const F above_mean =
              kDropout ? S::fms(dp, dropout_scale, delta[v]) : S::sub(dp, delta[v]);
          dx[u][v] = S::mul(weight, above_mean);
        }
      }
      put_rows(x_.p, j, t, p);
      if (kWatched) {
        for (int u = 0; u < 2; ++u) {
          for (int v = 0; v < kVectors; ++v) S::store(x_.dp + (j + u) * W + v * L, dx[u][v]);
        }
      } else {
        put_rows(x_.ds, j, t, dx);
        put_row_pairs(j, t, dx);
      }
    }
  }

  // The gradients that dX and dS^T hold beside dq, dk and dv; then dS^T into the tile.
  __attribute__((noinline)) void watch(int64_t m0, int t, const StripRows<S>& rows,
                                       const Visible<S>& visible) {
    if (args_.slope_parts && !in_bias_block_) {
      add_slopes<S>(*sequence_, rows, keys_, visible, x_.dp, slope_);
    }
    if (!call_.bias_pre_scale) put_bias(m0, t, rows, visible);
    for (int j = visible.first; j < visible.last; j += 2) {
      F ds[2][kVectors];
      for (int u = 0; u < 2; ++u) {
        for (int v = 0; v < kVectors; ++v) {
          const int64_t place = (j + u) * W + v * L;
          ds[u][v] = S::load(x_.dp + place);
          if (call_.softcap > 0 && j + u < visible.last) {
            ds[u][v] = S::mul(ds[u][v], S::load(x_.cap + place));
            S::store(x_.dp + place, ds[u][v]);
          }
        }
      }
      put_rows(x_.ds, j, t, ds);
      put_row_pairs(j, t, ds);
    }
    if (call_.bias_pre_scale) put_bias(m0, t, rows, visible);
  }

  void put_bias(int64_t m0, int t, const StripRows<S>& rows, const Visible<S>& visible) {
    const float scale = call_.bias_pre_scale ? call_.softmax_scale : 1.0f;
    const auto plane_row = [&](int64_t i) {
      return const_cast<char*>(at(args_.dbias, sequence_->n, head_, sequence_->dense_q + i,
                                  sequence_->dense_k + keys_.n0));
    };
    switch (args_.bias_gradient) {
      case BiasGradient::kNone:
        return;
      case BiasGradient::kStore:
        if (!call_.adds) {
          return store_bias<S, false>(rows, visible, x_.dp, scale, args_.dbias.dtype, plane_row);
        }
        [[fallthrough]];
      case BiasGradient::kAdd:
        return store_bias<S, true>(rows, visible, x_.dp, scale, args_.dbias.dtype, plane_row);
      case BiasGradient::kBlock: {
        if (!in_bias_block_) return;
        const auto tile_row = [&](int64_t i) {
          return reinterpret_cast<char*>(bias_sum_ + (i - m0) * B);
        };
        return store_bias<S, true>(rows, visible, x_.dp, 1.0f, TESSERA_FP32, tile_row);
      }
      case BiasGradient::kKeys:
        return add_bias_keys<S>(visible, x_.dp, scale, x_.bias_keys);
      case BiasGradient::kRows:
        return add_bias_rows<S>(visible, x_.dp, scale, x_.bias_rows + m0 + t * W);
    }
  }

  // Rows j and j + 1 of a strip into its columns of the tile's P or dS.
  __attribute__((always_inline)) void put_rows(Word* tile, int j, int t, F (&row)[2][kVectors]) {
    for (int u = 0; u < 2; ++u) {
      Word* to = tile + (j + u) * x_.p_step + t * W / kPerWord;
      if constexpr (kPairs) {
        S::store_pairs(to, S::narrow_row(row[u][0], row[u][1]));
      } else {
        for (int v = 0; v < kVectors; ++v) S::store(to + v * L, row[u][v]);
      }
    }
  }
  __attribute__((always_inline)) void put_row_pairs(int j, int t, F (&row)[2][kVectors]) {
    if constexpr (kPairs) {
      Word* to = x_.ds_pairs + j / 2 * x_.ds_pairs_step + t * W;
      for (int v = 0; v < kVectors; ++v) {
        S::store_pairs(to + v * L, S::make_pairs(row[0][v], row[1][v]));
      }
    }
  }

  // Keys [first, last) of a strip's columns of P and dS, which dK and dV read.
  void clear_columns(int t, int first, int last) {
    for (int j = first; j < last; ++j) {
      const int64_t place = j * x_.p_step + t * W / kPerWord;
      for (int i = 0; i < W / kPerWord; i += L) {
        S::store(reinterpret_cast<float*>(x_.p + place + i), S::zero());
        S::store(reinterpret_cast<float*>(x_.ds + place + i), S::zero());
      }
    }
  }

  bool in_bias_block_ = false;
  float* bias_sum_ = nullptr;  // [M][B]: what a tile's dX is added to in a bias block
  int64_t finished_ = 0;       // dq of strips before it is done
  float* dq_ = nullptr;
  bool sums_begun_[B / R];  // there is something in dk and dv of a register tile of keys
  F slope_[kVectors];       // of dalibi_slopes
  alignas(64) uint32_t keep_[B / 32][W];
};

template <typename S, bool kPairs, typename T>
void run_backward_task(const BackwardArgs& args, BackwardPhase phase, int64_t task, char* scratch) {
  Backward<S, kPairs, T> work(args, scratch);
  switch (phase) {
    case BackwardPhase::kMain:
      return work.main_task(task);
    case BackwardPhase::kReduceQ:
      return work.reduce_q_task(task);
    case BackwardPhase::kReduceKv:
      return work.reduce_kv_task(task);
    case BackwardPhase::kStorePages:
      return work.store_pages_task(task);
    case BackwardPhase::kBiasBlock:
      return work.bias_block_task(task);
  }
}

// A level with products of bf16 differs from the one below in bf16 alone: the rest is left to that.
template <typename S>
void backward_task(const BackwardArgs& args, BackwardPhase phase, int64_t task, char* scratch) {
  const int32_t dtype = args.call.q.dtype;
  if constexpr (S::kHasBf16Dot) {
    if (dtype != TESSERA_BF16) return S::below().backward(args, phase, task, scratch);
    if constexpr (S::kHasTiles) S::begin_tiles();
    run_backward_task<S, true, Bf16>(args, phase, task, scratch);
    if constexpr (S::kHasTiles) S::end_tiles();
  } else {
    if (dtype == TESSERA_FP32) {
      return run_backward_task<S, false, float>(args, phase, task, scratch);
    }
    if (dtype == TESSERA_FP16) return run_backward_task<S, false, Fp16>(args, phase, task, scratch);
    return run_backward_task<S, false, Bf16>(args, phase, task, scratch);
  }
}

template <typename S>
int64_t backward_scratch_bytes(const BackwardArgs& args) {
  if constexpr (S::kHasBf16Dot) {
    if (args.call.q.dtype != TESSERA_BF16) return S::below().backward_scratch_bytes(args);
  }
  return Scratch<S, S::kHasBf16Dot>(args, nullptr).bytes;
}

}  // namespace
}  // namespace tessera::cpu
