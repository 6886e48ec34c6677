// SPDX-License-Identifier: Apache-2.0
// What a backward task reads and writes: rows of q, do, o, k, v into its scratch, rows of dq, dk,
// dv out of it, rounded once or as partial sums.
#pragma once

#include "cpu/backward/scratch.h"

namespace tessera::cpu {
namespace {

TESSERA_INLINE char* row_at(const Rows& t, int64_t batch, int64_t row, int64_t head) {
  return t.data + batch * t.batch + row * t.row + head * t.head;
}

// Row of key j: in its page, or in its sequence.
TESSERA_INLINE char* row_of_key(const Rows& t, const Pages& pages, const CallSequence& sequence,
                                int64_t j, int64_t head) {
  if (!pages.table) return row_at(t, sequence.batch_k, sequence.first_k + j, head);
  const int64_t place = j / pages.page_size;
  const int32_t page =
      load_int32(pages.table + sequence.n * pages.stride[0] + place * pages.stride[1]);
  return row_at(t, page, j % pages.page_size, head);
}

// to[d] = scale (from[d] + more[d]), rounded once; more may be null. adds: to[d] += it.
template <typename S, typename To>
TESSERA_INLINE void store_row(To* to, const float* from, const float* more, float scale,
                              int64_t dim, bool adds = false) {
  constexpr int L = S::kLanes;
  int64_t d = 0;
  for (; d + L <= dim; d += L) {
    auto x = S::load(from + d);
    if (more) x = S::add(S::load(more + d), x);
    x = S::mul(x, S::set1(scale));
    S::store(to + d, adds ? S::add(S::load(to + d), x) : x);
  }
  if (d < dim) {
    const int n = static_cast<int>(dim - d);
    auto x = S::load_n(from + d, n);
    if (more) x = S::add(S::load_n(more + d, n), x);
    x = S::mul(x, S::set1(scale));
    S::store_n(to + d, adds ? S::add(S::load_n(to + d, n), x) : x, n);
  }
}

template <typename S, bool kPairs, typename T>
class BackwardRows {
 protected:
  static constexpr int L = S::kLanes, R = S::kRows;
  using Mine = Scratch<S, kPairs>;
  static constexpr int W = Mine::W, B = Mine::B, M = Mine::M, kPerWord = Mine::kPerWord;
  using Word = typename Mine::Word;
  using F = typename S::F;

  BackwardRows(const BackwardArgs& args, char* scratch)
      : args_(args), call_(args.call), x_(args, scratch) {
    memset(x_.zeros, 0, static_cast<size_t>(4 * larger(call_.dqk, call_.dv)));
  }

  // ---- in ----

  // Words of rows as they lie, padded with zeros.
  static void copy_rows(const char* const* rows, int count, int64_t dim, Word* to, int64_t step) {
    if constexpr (kPairs)
      copy_pairs<S>(rows, count, dim, to, step);
    else
      widen_rows<S, T>(rows, count, dim, to, step);
  }

  void copy_queries(const Rows& from, int64_t strip, int64_t dim, Word* to, int64_t step) const {
    const char* row[W];
    for (int l = 0; l < W; ++l) {
      const int64_t i = strip * W + l;
      row[l] = x_.zeros;
      if (i >= sequence_->band.len_q) continue;
      row[l] = row_at(from, sequence_->batch_q, sequence_->first_q + i, head_);
      if (is_wide(from.dtype)) row[l] = narrowed(row[l], l, dim);
    }
    copy_rows(row, W, dim, to, step);
  }

  // fp32 beside inputs of 16 bits: o, do and gradients may be.
  static bool is_wide(int32_t dtype) { return sizeof(T) == 2 && dtype == TESSERA_FP32; }

  // A row of fp32 as T, in the scratch's row l: products take no more.
  const char* narrowed(const char* row, int l, int64_t dim) const {
    T* to = reinterpret_cast<T*>(x_.narrowed) + l * dim;
    for (int64_t d = 0; d < dim; d += L) {
      const int n = static_cast<int>(smaller<int64_t>(L, dim - d));
      S::store_n(to + d, S::load_n(reinterpret_cast<const float*>(row) + d, n), n);
    }
    return reinterpret_cast<const char*>(to);
  }

  // Calls store(to) with the row `to` of a gradient as what it holds.
  template <typename Store>
  TESSERA_INLINE void into(const Rows& gradient, char* to, Store&& store) {
    if constexpr (sizeof(T) == 2) {
      if (is_wide(gradient.dtype)) return store(reinterpret_cast<float*>(to));
    }
    store(reinterpret_cast<T*>(to));
  }

  // K and V of the block. A key that the band hides from every query, or a mask by key from this
  // head, may hold anything.
  __attribute__((noinline)) void prepare_keys() {
    keys_ready_ = true;
    const int64_t head_k = head_ / call_.group;
    const Interval seen = sequence_->band.keys();
    const int rows = static_cast<int>(pad_to(keys_.count, S::kHasTiles ? 2 * L : R));
    const char *k[B], *v[B];
    for (int j = 0; j < rows; ++j) {
      k[j] = v[j] = x_.zeros;
      const int64_t key = keys_.n0 + j;
      if (j >= keys_.count || !seen.contains(key)) continue;
      if (call_.mask_by_key &&
          static_cast<uint8_t>(*at(call_.mask, sequence_->n, head_, 0, sequence_->dense_k + key)) ==
              call_.mask_hides) {
        continue;
      }
      k[j] = row_of_key(call_.k, call_.k_pages, *sequence_, key, head_k);
      v[j] = row_of_key(call_.v, call_.v_pages, *sequence_, key, head_k);
    }
    copy_rows(k, rows, call_.dqk, x_.k, x_.k_step);
    copy_rows(v, rows, call_.dv, x_.v, x_.v_step);
    if constexpr (S::kHasTiles) {
      const auto row = [&](int64_t j) {
        return reinterpret_cast<const Bf16*>(x_.k + j * x_.k_step);
      };
      turn_pairs<S>(row, rows, call_.dqk, {x_.k_t, x_.k_t_step});
    } else if constexpr (kPairs) {
      interleave_pairs<S>(x_.k, x_.k_step, rows, call_.dqk, x_.k_pairs, x_.k_pairs_step);
    }
  }

  // The place of a strip in the ring: those of a tile are neighbours, since tiles begin at
  // multiples of M and the ring holds whole tiles, or all strips there are.
  int64_t place_of(int64_t strip) const { return strip % args_.held_strips; }

  // Q and dO of a tile: rows, for dK and dV, and columns, for S^T and dP^T.
  void prepare_queries(int64_t m0, int strips) {
    const int64_t row = place_of(m0 / W) * W;
    const Word *q = x_.q_rows + row * x_.q_rows_step, *d_o = x_.do_rows + row * x_.do_rows_step;
    if constexpr (kPairs) {
      interleave_pairs<S>(q, x_.q_rows_step, strips * W, call_.dqk, x_.q, x_.q_step);
      interleave_pairs<S>(d_o, x_.do_rows_step, strips * W, call_.dv, x_.d_o, x_.do_step);
    } else {
      x_.q = const_cast<Word*>(q), x_.d_o = const_cast<Word*>(d_o);
    }
    for (int t = 0; t < strips; ++t) {
      transpose_rows<S>(q + t * W * x_.q_rows_step, x_.q_rows_step, x_.qk_depth,
                        x_.q_t + t * W * x_.qk_depth);
      transpose_rows<S>(d_o + t * W * x_.do_rows_step, x_.do_rows_step, x_.v_depth,
                        x_.do_t + t * W * x_.v_depth);
    }
  }

  // The rows of strips up to `end`, and their part of dsink.
  void prepare_strips(int64_t end) {
    const CallSequence& sequence = *sequence_;
    for (; prepared_ < end; ++prepared_) {
      const int64_t strip = prepared_, place = place_of(strip);
      StripRows<S>& rows = x_.rows[place];
      const int n = static_cast<int>(smaller<int64_t>(W, sequence.band.len_q - strip * W));
      float *lse = x_.lse + place * W, *dlse = x_.dlse + place * W;
      x_.dq_begun[place] = false;
      for (int l = 0; l < W; ++l) {
        const int64_t i = strip * W + l, row = sequence.first_q + i;
        lse[l] = kInfinity, dlse[l] = 0.0f;
        if (l < n) {
          rows.token[l] = i, rows.head[l] = head_;
          memcpy(&lse[l], at(call_.lse, sequence.batch_q, head_, row), sizeof(float));
          if (lse[l] == -kInfinity) lse[l] = kInfinity;
          if (args_.dlse.data) {
            memcpy(&dlse[l], at(args_.dlse, sequence.batch_q, head_, row), sizeof(float));
          }
        }
      }
      Word* do_rows = x_.do_rows + place * W * x_.do_rows_step;
      copy_queries(call_.q, strip, call_.dqk, x_.q_rows + place * W * x_.q_rows_step,
                   x_.q_rows_step);
      copy_queries(args_.d_o, strip, call_.dv, do_rows, x_.do_rows_step);
      find_delta(strip, do_rows);
      rows.resolve(call_, sequence, n);
      rows.vectors = kVectors;
      for (int l = 0; l < n && args_.sink_parts; ++l) {
        sink_sum_ -= __builtin_exp(sink_ - lse[l]) * x_.delta[place * W + l];
      }
      for (int l = 0; l < n; ++l) {  // a sink's alone: every score is as low, hence -inf
        if (lse[l] <= kHiddenScore) lse[l] = kInfinity;
      }
    }
  }

  // mean = rowsum(do o), in the very order in which dP^T sums do v: where a row sees one key, o is
  // v, and dP - mean is 0 as it should be. delta = mean - dlse.
  void find_delta(int64_t strip, const Word* do_rows) {
    float* mean = x_.mean + place_of(strip) * W;
    is_wide(call_.o.dtype) ? find_wide_mean(strip, mean) : find_mean(strip, do_rows, mean);
    for (int v = 0; v < kVectors; ++v) {
      const int64_t at = place_of(strip) * W + v * L;
      S::store(x_.delta + at, S::sub(S::load(x_.mean + at), S::load(x_.dlse + at)));
    }
  }

  void find_mean(int64_t strip, const Word* do_rows, float* mean) {
    copy_queries(call_.o, strip, call_.dv, x_.o_rows, x_.do_rows_step);
    if constexpr (S::kHasTiles) {  // the diagonal of o do^T
      transpose_rows<S>(do_rows, x_.do_rows_step, x_.v_depth, x_.do_t);
      for (int v = 0; v < kVectors; ++v) {
        alignas(64) float products[L * L];
        multiply_block<S, 1, 1, false>(x_.v_depth,
                                       {x_.o_rows + v * L * x_.do_rows_step, x_.do_rows_step},
                                       {x_.do_t + v * L, W}, {products, L});
        for (int l = 0; l < L; ++l) mean[v * L + l] = products[l * L + l];
      }
      return;
    }
    transpose_rows<S>(x_.o_rows, x_.do_rows_step, x_.v_depth, x_.o_t);
    transpose_rows<S>(do_rows, x_.do_rows_step, x_.v_depth, x_.do_t);
    for (int v = 0; v < kVectors; ++v) {
      const Word *o = x_.o_t + v * L, *d_o = x_.do_t + v * L;
      F total = S::zero();
      for (int64_t begin = 0; begin < x_.v_depth; begin += x_.depth_piece) {
        F sum = S::zero();
        for (int64_t k = begin; k < smaller(begin + x_.depth_piece, x_.v_depth); ++k) {
          sum = multiply_lanes<S>(o + k * W, d_o + k * W, sum);
        }
        total = begin == 0 ? sum : S::add(total, sum);
      }
      S::store(mean + v * L, total);
    }
  }

  // The same for an o in fp32 beside 16-bit inputs: rounding o would move it away from the v that
  // it is the mean of. do is rounded, as dP has it.
  void find_wide_mean(int64_t strip, float* mean) {
    for (int l = 0; l < W; ++l) {
      const int64_t i = strip * W + l;
      mean[l] = 0;
      if (i >= sequence_->band.len_q) continue;
      const int64_t row = sequence_->first_q + i;
      const auto* o =
          reinterpret_cast<const float*>(row_at(call_.o, sequence_->batch_q, row, head_));
      const char* d_o = row_at(args_.d_o, sequence_->batch_q, row, head_);
      if (is_wide(args_.d_o.dtype)) d_o = narrowed(d_o, l, call_.dv);
      F sum = S::zero();
      for (int64_t d = 0; d < call_.dv; d += L) {
        const int n = static_cast<int>(smaller<int64_t>(L, call_.dv - d));
        sum = S::fma(S::load_n(reinterpret_cast<const T*>(d_o) + d, n), S::load_n(o + d, n), sum);
      }
      mean[l] = S::reduce_add(sum);
    }
  }

  // Asks for a share of the rows that are copied next, between products: those of the queries after
  // the tile, then the keys after the block, each beside rows of gradients that are stored soon.
  // They lie a head's or a page's distance apart, which hardware does not guess.
  void ask_ahead() {
    const int64_t queries = smaller(ahead_.queries_end, (prepared_ * W) + M);
    ahead_.query = larger(ahead_.query, prepared_ * W);
    for (int n = 0; n < 2; ++n, ++ahead_.query) {
      if (ahead_.query >= queries) break;
      const int64_t row = sequence_->first_q + ahead_.query, batch = sequence_->batch_q;
      ask_row(row_at(call_.q, batch, row, head_), call_.dqk);
      ask_row(row_at(args_.d_o, batch, row, head_), call_.dv);
      ask_row(row_at(call_.o, batch, row, head_), call_.dv);
    }
    if (ahead_.query < queries) return;
    const Interval seen = sequence_->band.keys();
    const int64_t head_k = head_ / call_.group;
    const int64_t keys = smaller(smaller(ahead_.keys_end, seen.hi), keys_.n0 + 2 * B);
    ahead_.key = larger(larger(ahead_.key, seen.lo), keys_.n0 + B);
    for (int n = 0; n < 3 && ahead_.key < keys; ++n, ++ahead_.key) {
      ask_row(row_of_key(call_.k, call_.k_pages, *sequence_, ahead_.key, head_k), call_.dqk);
      ask_row(row_of_key(call_.v, call_.v_pages, *sequence_, ahead_.key, head_k), call_.dv);
    }
  }
  static void ask_row(const char* row, int64_t dim) {
    const int64_t bytes = dim * static_cast<int64_t>(sizeof(T));
    for (int64_t at = 0; at < bytes; at += 64) prefetch(row + at);
  }

  // ---- out ----

  // dq of a strip from `chunks` partial sums that are step floats apart.
  __attribute__((noinline)) void store_dq(int64_t strip, const float* parts, int64_t step,
                                          int chunks) {
    const int64_t dqk = call_.dqk;
    const F scale = S::set1(call_.softmax_scale);
    for (int v = 0; v < kVectors; ++v) {
      const int64_t i = strip * W + v * L;
      const int rows = static_cast<int>(smaller<int64_t>(L, sequence_->band.len_q - i));
      for (int64_t d = 0; d < dqk && rows > 0; d += L) {
        const int n = static_cast<int>(smaller<int64_t>(L, dqk - d));
        const float* from = parts + d * W + v * L;
        F x[L];
        TESSERA_UNROLL
        for (int k = 0; k < L; ++k) {
          x[k] = k < n ? S::mul(sum_of_chunks(from + k * W, step, chunks), scale) : S::zero();
        }
        S::transpose(x);
        char* to = row_at(args_.dq, sequence_->batch_q, sequence_->first_q + i, head_);
        if (n == L && rows == L) {
          TESSERA_UNROLL
          for (int r = 0; r < L; ++r, to += args_.dq.row) {
            into(args_.dq, to, [&](auto* row) {
              S::store(row + d, call_.adds ? S::add(S::load(row + d), x[r]) : x[r]);
            });
          }
        } else {
          for (int r = 0; r < rows; ++r, to += args_.dq.row) {
            into(args_.dq, to, [&](auto* row) {
              S::store_n(row + d, call_.adds ? S::add(S::load_n(row + d, n), x[r]) : x[r], n);
            });
          }
        }
      }
    }
  }

  TESSERA_INLINE F sum_of_chunks(const float* from, int64_t step, int chunks) {
    F sum = chunks > 0 ? S::load(from) : S::zero();
    for (int c = 1; c < chunks; ++c) sum = S::add(sum, S::load(from + c * step));
    return sum;
  }

  // Blocks of a chunk of the sequence's keys, and the strips, from a whole tile on, that the band
  // lets see some of it.
  Interval blocks_of_chunk(int64_t chunk) const {
    const int64_t blocks = pad_to(sequence_->band.len_k, B) / B;
    return {blocks * chunk / args_.chunks, blocks * (chunk + 1) / args_.chunks};
  }
  Interval strips_of_chunk(int64_t chunk) const {
    const Interval blocks = blocks_of_chunk(chunk);
    const Interval queries = sequence_->band.rows(blocks.lo * B, blocks.hi * B);
    if (queries.empty()) return {0, 0};
    return {queries.lo / M * M / W, pad_to(queries.hi, W) / W};
  }

  void zero_queries_outside() {
    zero_rows(args_.dq, sequence_->batch_q, args_.owned_q[sequence_->n], sequence_->first_q,
              sequence_->band.len_q, head_, call_.dqk);
  }
  void zero_keys_outside(int64_t head) {
    const Interval owned = args_.owned_k[sequence_->n];
    const int64_t first = sequence_->first_k, len = sequence_->band.len_k, n = sequence_->batch_k;
    if (args_.dk.data) zero_rows(args_.dk, n, owned, first, len, head, call_.dqk);
    if (args_.dv.data) zero_rows(args_.dv, n, owned, first, len, head, call_.dv);
  }

  // Rows that a sequence owns outside its own [first, first + len): there is nothing to add to
  // them.
  void zero_rows(const Rows& t, int64_t batch, Interval owned, int64_t first, int64_t len,
                 int64_t head, int64_t dim) const {
    if (call_.adds) return;
    const auto zero = [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        memset(row_at(t, batch, r, head), 0,
               static_cast<size_t>(dim) * (is_wide(t.dtype) ? sizeof(float) : sizeof(T)));
      }
    };
    zero(owned.lo, smaller(first, owned.hi));
    zero(larger(first + len, owned.lo), owned.hi);
  }

  // A row of dk or dv of this head: to the gradient if it is the last addend, to the sums if not.
  void flush_key(const Rows& gradient, const Pages& pages, float* parts, float* pool, float* sums,
                 const float* row, int j, int64_t dim, float scale) {
    const int64_t key = keys_.n0 + j, head_k = head_ / call_.group;
    float* sum = sums + key * dim;
    if (parts) {
      sum =
          parts +
          ((part_ * call_.hk + head_k) * args_.key_slots + key_slot(args_, *sequence_) + key) * dim;
    }
    const float* before = first_of_group_ ? nullptr : sum;
    if (parts || !last_of_group_) return store_row<S>(sum, row, before, 1.0f, dim);
    // Whoever is seen by nobody may have no page; its gradient has been set to 0 with the pool's.
    if (pages.table && !sequence_->band.keys().contains(key)) return;
    if (args_.shared_pages) {
      const int64_t place = key / pages.page_size;
      const int32_t page =
          load_int32(pages.table + sequence_->n * pages.stride[0] + place * pages.stride[1]);
      const int64_t pool_row = page * pages.page_size + key % pages.page_size;
      float* to = pool + (pool_row * call_.hk + head_k) * dim;
      if (before) store_row<S>(sum, row, before, 1.0f, dim);
      return store_row<S>(to, before ? sum : row, to, 1.0f, dim);
    }
    char* to = row_of_key(gradient, pages, *sequence_, key, head_k);
    into(gradient, to, [&](auto* d) { store_row<S>(d, row, before, scale, dim, call_.adds); });
  }

  void reduce_key(const Rows& gradient, const float* parts, int64_t j, int64_t head, int64_t dim,
                  float scale) {
    const int64_t step = call_.hk * args_.key_slots * dim;
    const float* from = parts + (head * args_.key_slots + key_slot(args_, *sequence_) + j) * dim;
    for (int part = 1; part + 1 < args_.parts; ++part) {
      store_row<S>(const_cast<float*>(from), from + part * step, from, 1.0f, dim);
    }
    char* to = row_at(gradient, sequence_->batch_k, sequence_->first_k + j, head);
    const float* last = from + (args_.parts - 1) * step;
    into(gradient, to, [&](auto* d) { store_row<S>(d, last, from, scale, dim, call_.adds); });
  }

  void store_pool(const Rows& gradient, const float* pool, int64_t rows, int64_t page_size,
                  int64_t head, int64_t share, int64_t dim, float scale) {
    for (int64_t r = rows * share / kReduceParts; r < rows * (share + 1) / kReduceParts; ++r) {
      char* to = row_at(gradient, r / page_size, r % page_size, head);
      const float* row = pool + (r * call_.hk + head) * dim;
      into(gradient, to, [&](auto* d) { store_row<S>(d, row, nullptr, scale, dim, call_.adds); });
    }
  }

  // ---- reductions ----

  void reduce_q_task(int64_t task) {
    const int64_t share = task % kReduceParts;
    task /= kReduceParts;
    const int64_t head = task % call_.hq;
    sequence_ = &call_.sequences[args_.sequence_begin + task / call_.hq];
    const int64_t strips = pad_to(sequence_->band.len_q, W) / W;
    const int64_t tile = gradient_rows(call_.dqk) * W, step = call_.hq * args_.strip_slots * tile;
    head_ = head;
    Interval seen[kMaxChunks];
    for (int c = 0; c < args_.chunks; ++c) seen[c] = strips_of_chunk(c);
    for (int64_t strip = strips * share / kReduceParts; strip < strips * (share + 1) / kReduceParts;
         ++strip) {
      int first = 0, end = args_.chunks;  // the band is monotone: chunks that see a strip are a run
      while (first < end && !seen[first].contains(strip)) ++first;
      while (first < end && !seen[end - 1].contains(strip)) --end;
      store_dq(strip, dq_part(first) + strip * tile, step, end - first);
    }
    if (share == 0) zero_queries_outside();
  }

  void reduce_kv_task(int64_t task) {
    const int64_t share = task % kReduceParts;
    task /= kReduceParts;
    const int64_t head = task % call_.hk;
    sequence_ = &call_.sequences[args_.sequence_begin + task / call_.hk];
    const int64_t keys = sequence_->band.len_k;
    for (int64_t j = keys * share / kReduceParts; j < keys * (share + 1) / kReduceParts; ++j) {
      if (args_.dk.data) {
        reduce_key(args_.dk, args_.dk_parts, j, head, call_.dqk, call_.softmax_scale);
      }
      if (args_.dv.data) {
        reduce_key(args_.dv, args_.dv_parts, j, head, call_.dv, call_.dropout_scale);
      }
    }
    if (share == 0) zero_keys_outside(head);
  }

  void store_pages_task(int64_t task) {
    const int64_t share = task % kReduceParts, head = task / kReduceParts;
    if (args_.dk.data) {
      store_pool(args_.dk, args_.dk_pool, args_.pool_rows_k, call_.k_pages.page_size, head, share,
                 call_.dqk, call_.softmax_scale);
    }
    if (args_.dv.data) {
      store_pool(args_.dv, args_.dv_pool, args_.pool_rows_v, call_.v_pages.page_size, head, share,
                 call_.dv, call_.dropout_scale);
    }
  }

  // The slot at which this head's partial sums begin.
  int64_t slot() const { return strip_slot(args_, *sequence_, W); }
  float* dq_part(int64_t chunk) const {
    return args_.dq_parts +
           ((chunk * call_.hq + head_) * args_.strip_slots + slot()) * gradient_rows(call_.dqk) * W;
  }

  const BackwardArgs& args_;
  const Call& call_;
  Mine x_;
  const CallSequence* sequence_ = nullptr;
  int64_t head_ = 0;                                   // of queries
  int64_t part_ = 0;                                   // of the group
  bool first_of_group_ = true, last_of_group_ = true;  // head_ in this task's part
  Keys<S> keys_;                                       // the block
  bool keys_ready_ = false;                            // K and V of the block are in scratch
  int64_t prepared_ = 0;  // strips before it are in the ring, as many as it holds
  double sink_ = 0;
  double sink_sum_ = 0;  // of dsink, over the strips prepared
  struct {
    int64_t query, queries_end, key, keys_end;
  } ahead_{};  // what ask_ahead asks for next, and where it stops
};

}  // namespace
}  // namespace tessera::cpu
