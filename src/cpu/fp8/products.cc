// SPDX-License-Identifier: Apache-2.0
// An fp32 problem with columns more has the same scores and the gradients that are asked for, so
// that no kernel need know of two kinds of q, k and do:
//
//   q   [ q^  | <q, kbar> | q | 0 ]      v   [ v^  | 0  ]      S  = q^ k^ + <q, kbar>
//   k   [ k^  |     1     | 0 | k ]      do  [ do^ | do ]      dP = v^ do^     delta = do^ o
//   dq    .         .       .  dS k      o   [ o   | 0  ]
//   dk    .         .     dS q  .        dv    .    P do
//
// Forward there are but the first columns. <q, kbar> is there where k is less its mean.
#include "cpu/fp8/products.h"

#include <algorithm>

#include "core/mask/sequence.h"
#include "core/problem/scales.h"
#include "core/quantise/quantise.h"
#include "core/workspace.h"
#include "cpu/backward/run.h"
#include "cpu/call.h"
#include "cpu/forward/run.h"
#include "cpu/fp8/rows.h"
#include "cpu/pool.h"

namespace tessera::cpu {
namespace {

constexpr int64_t kTaskRows = 64;  // of queries, of all heads

int64_t ceil_div(int64_t x, int64_t unit) { return (x + unit - 1) / unit; }

class Products {
 public:
  // base may be null: then only bytes() is of use.
  Products(const Problem& problem, int num_threads, void* base)
      : p_(problem), sizes_(sizes_of(problem)), rotation_(problem), inner_(wide(problem)) {
    Workspace all(base);
    for (const int index : kScaledTensors) {
      if (given(p_, index))
        data_[index] = all.take<float>(element_count(inner_.tensor[index], 4), 64);
    }
    const Count head = Count{sizes_.hk} * sizes_.dqk;
    if (has_mean()) {
      sums_ = all.take<float>(head * block_slots(), 64);
      means_ = all.take<float>(head * sizes_.batch, 64);
    }
    const int64_t columns = std::max(sizes_.dqk, sizes_.dv);
    block_ =
        all.take<float>(Count{num_threads_or_default(num_threads)} * kScaledKeys * columns, 64);
    workspace_bytes_ = is_backward(p_) ? backward_workspace_bytes(inner_, num_threads)
                                       : forward_workspace_bytes(inner_, num_threads);
    workspace_ = all.take<char>(workspace_bytes_, 64);
    bytes_ = all.bytes();
  }

  int64_t bytes() const { return bytes_; }

  Status run(const Buffers& buffers) {
    b_ = &buffers;
    if (!has_no_rows(p_)) {
      if (has_mean()) take_means();
      round_keys();
      round_queries();
    }
    Buffers inside = buffers;
    inside.workspace = workspace_;
    inside.workspace_bytes = workspace_bytes_;
    inside.softmax_scale = softmax_scale_of(p_, buffers);
    for (const int index : kScaledTensors) {
      if (given(p_, index)) inside.data[index] = data_[index];
    }
    if (is_backward(p_)) {
      run_backward(inner_, inside);
    } else {
      TESSERA_RETURN_IF_ERROR(run_forward(inner_, inside));
    }
    for (const int index : kScaledTensors) {
      if (!given(p_, index) || !is_output(p_, index)) continue;
      narrow_rows(p_, buffers, index, data_[index] + first_column(index), columns_of(index));
    }
    return {};
  }

 private:
  bool has_mean() const { return has(p_, TESSERA_SMOOTH_MEAN); }
  static int64_t of_scores(const Problem& p) {
    return p.tensor[TESSERA_Q].extent[3] + (has(p, TESSERA_SMOOTH_MEAN) ? 1 : 0);
  }

  // The problem inside. Its softmax_scale is that of the caller's columns.
  static Problem wide(const Problem& p) {
    Problem wider = p;
    const int64_t dqk = p.tensor[TESSERA_Q].extent[3];
    for (const int index : kScaledTensors) {
      if (!given(p, index)) continue;
      int64_t& columns = wider.tensor[index].extent[3];
      if (index == TESSERA_Q || index == TESSERA_K || index == TESSERA_DQ || index == TESSERA_DK) {
        columns = of_scores(p) + (is_backward(p) ? 2 * dqk : 0);
      } else if (is_backward(p)) {
        columns *= 2;
      }
    }
    wider.flags &= ~(TESSERA_FP8_PRODUCTS | TESSERA_SMOOTH_MEAN | TESSERA_SMOOTH_HADAMARD);
    wider.flags |= TESSERA_SOFTMAX_SCALE;
    return problem_of_values(wider);
  }

  int64_t columns_of(int index) const { return inner_.tensor[index].extent[3]; }

  // Where a result stands in its row.
  int64_t first_column(int index) const {
    switch (index) {
      case TESSERA_DQ:
        return of_scores(p_) + sizes_.dqk;
      case TESSERA_DK:
        return of_scores(p_);
      case TESSERA_DV:
        return sizes_.dv;
    }
    return 0;
  }

  float* query_row(int index, const Sequence& s, int64_t i, int64_t h) const {
    return data_[index] + offset_of(inner_.tensor[index], s.batch_q, s.first_q + i, h);
  }
  float* key_row(int index, const Sequence& s, int64_t j, int64_t h) const {
    return data_[index] + offset_of(inner_.tensor[index], s.batch_k, s.first_k + j, h);
  }
  // Row or key i of a sequence, as the caller has it.
  void widen(int index, const Sequence& s, int64_t i, int64_t h, float* to) const {
    const Tensor& t = p_.tensor[index];
    const bool keys = index == TESSERA_K || index == TESSERA_V;
    const int64_t at = keys ? offset_of(t, s.batch_k, s.first_k + i, h)
                            : offset_of(t, s.batch_q, s.first_q + i, h);
    const auto scale = static_cast<float>(scale_at(p_, *b_, scale_of(index), s.n, h, i));
    widen_row(b_->data[index], at, t.dtype, scale, t.extent[3], to);
  }

  // ---- blocks of keys ----

  // Calls body(sequence, block, its keys that some query may see, worker); the others may hold
  // anything.
  template <typename Body>
  void each_block(Body&& body) const {
    const int64_t blocks = ceil_div(sizes_.sk, kScaledKeys);
    parallel_for(*b_, sizes_.batch * blocks, [&](int64_t task, int worker) {
      const Sequence s = sequence_of(p_, *b_, task / blocks);
      const int64_t begin = task % blocks * kScaledKeys;
      if (begin >= s.len_k()) return;
      const Interval seen = s.band.keys();
      body(s, begin, Interval{std::max(begin, seen.lo), std::min(begin + kScaledKeys, seen.hi)},
           worker);
    });
  }
  // Packed sequences do not begin on blocks.
  Count block_slots() const {
    const Count blocks = Count{sizes_.sk}.pieces(kScaledKeys);
    return is_thd_k(p_) ? blocks + sizes_.batch : blocks * sizes_.batch;
  }
  float* sum_of(const Sequence& s, int64_t block, int64_t h) const {
    const int64_t first =
        is_thd_k(p_) ? s.first_k / kScaledKeys + s.n : s.n * ceil_div(sizes_.sk, kScaledKeys);
    return sums_ + ((first + block) * sizes_.hk + h) * sizes_.dqk;
  }
  float* mean_of(int64_t n, int64_t h) const {
    return has_mean() ? means_ + (n * sizes_.hk + h) * sizes_.dqk : nullptr;
  }

  void take_means() const {
    const int64_t d = sizes_.dqk;
    each_block([&](const Sequence& s, int64_t begin, Interval keys, int worker) {
      float* one = block_of(worker);
      for (int64_t h = 0; h < sizes_.hk; ++h) {
        float* sum = sum_of(s, begin / kScaledKeys, h);
        std::fill_n(sum, d, 0.0f);
        for (int64_t j = keys.lo; j < keys.hi; ++j) {
          widen(TESSERA_K, s, j, h, one);
          add_keys(one, 1, d, sum);
        }
      }
    });
    parallel_for(*b_, sizes_.batch, [&](int64_t n, int) {
      const Sequence s = sequence_of(p_, *b_, n);
      const Interval seen = s.band.keys();
      for (int64_t h = 0; h < sizes_.hk; ++h) {
        float* mean = mean_of(n, h);
        std::fill_n(mean, d, 0.0f);
        if (seen.empty()) continue;
        for (int64_t block = 0; block * kScaledKeys < s.len_k(); ++block) {
          add_keys(sum_of(s, block, h), 1, d, mean);
        }
        for (int64_t c = 0; c < d; ++c) mean[c] /= static_cast<float>(seen.hi - seen.lo);
      }
    });
  }

  float* block_of(int worker) const {
    return block_ + worker * kScaledKeys * std::max(sizes_.dqk, sizes_.dv);
  }

  void round_keys() const {
    each_block([&](const Sequence& s, int64_t begin, Interval seen, int worker) {
      const int64_t end = std::min(begin + kScaledKeys, s.len_k());
      for (int64_t h = 0; h < sizes_.hk; ++h) {
        for (const int index : {TESSERA_K, TESSERA_V}) {
          for (int64_t j = begin; j < end; ++j) {
            std::fill_n(key_row(index, s, j, h), columns_of(index), 0.0f);
          }
          round_block(index, s, seen, h, block_of(worker));
        }
      }
    });
  }

  void round_block(int index, const Sequence& s, Interval keys, int64_t h, float* block) const {
    if (keys.empty()) return;
    const bool is_k = index == TESSERA_K;
    const int64_t d = p_.tensor[index].extent[3], count = keys.hi - keys.lo;
    for (int64_t j = 0; j < count; ++j) widen(index, s, keys.lo + j, h, block + j * d);
    for (int64_t j = 0; is_k && j < count; ++j) {
      float* to = key_row(index, s, keys.lo + j, h);
      if (has_mean()) to[d] = 1;
      if (is_backward(p_)) std::copy_n(block + j * d, d, to + of_scores(p_) + d);
    }
    tessera::round_keys(block, count, d, is_k ? mean_of(s.n, h) : nullptr,
                        is_k ? &rotation_ : nullptr);
    for (int64_t j = 0; j < count; ++j) {
      std::copy_n(block + j * d, d, key_row(index, s, keys.lo + j, h));
    }
  }

  // ---- rows of queries ----

  void round_queries() const {
    const int64_t pieces = ceil_div(sizes_.sq, kTaskRows);
    parallel_for(*b_, sizes_.batch * pieces, [&](int64_t task, int) {
      const Sequence s = sequence_of(p_, *b_, task / pieces);
      const int64_t begin = task % pieces * kTaskRows;
      const int64_t end = std::min(begin + kTaskRows, s.len_q());
      for (int64_t i = begin; i < end; ++i) {
        for (int64_t h = 0; h < sizes_.hq; ++h) {
          round_q(s, i, h);
          if (is_backward(p_)) round_do(s, i, h);
        }
      }
    });
  }

  void round_q(const Sequence& s, int64_t i, int64_t h) const {
    const int64_t d = sizes_.dqk;
    float* q = query_row(TESSERA_Q, s, i, h);
    widen(TESSERA_Q, s, i, h, q);
    if (is_backward(p_)) {
      std::copy_n(q, d, q + of_scores(p_));
      std::fill_n(q + of_scores(p_) + d, d, 0.0f);
    }
    const float of_mean = round_query(q, d, mean_of(s.n, h / sizes_.group()), &rotation_);
    if (has_mean()) q[d] = of_mean;
  }

  // An fp8 do is rounded already.
  void round_do(const Sequence& s, int64_t i, int64_t h) const {
    const int64_t d = sizes_.dv;
    float* d_o = query_row(TESSERA_DO, s, i, h);
    widen(TESSERA_DO, s, i, h, d_o);
    std::copy_n(d_o, d, d_o + d);
    if (!is_fp8(p_.tensor[TESSERA_DO].dtype)) round_query(d_o, d, nullptr, nullptr);
    float* o = query_row(TESSERA_O, s, i, h);
    widen(TESSERA_O, s, i, h, o);
    std::fill_n(o + d, d, 0.0f);
  }

  const Problem& p_;
  const Sizes sizes_;
  const Rotation rotation_;
  const Problem inner_;
  const Buffers* b_ = nullptr;
  float* data_[TESSERA_NUM_TENSORS] = {};
  float* sums_ = nullptr;   // [block_slots()][hk][dqk]
  float* means_ = nullptr;  // [batch][hk][dqk]
  float* block_ = nullptr;  // of each worker: [kScaledKeys][dqk or dv]
  char* workspace_ = nullptr;
  int64_t workspace_bytes_ = 0, bytes_ = 0;
};

}  // namespace

int64_t products_workspace_bytes(const Problem& problem, int num_threads) {
  return Products(problem, num_threads, nullptr).bytes();
}

Status run_products(const Problem& problem, const Buffers& buffers) {
  return Products(problem, buffers.num_threads, buffers.workspace).run(buffers);
}

}  // namespace tessera::cpu
