// SPDX-License-Identifier: Apache-2.0
// What the reference asks of a problem for one sequence and one head: where rows are, which keys a
// query sees, what is added to its scores. Written from docs/semantics.md, element by element.
#pragma once

#include <cmath>
#include <limits>
#include <vector>

#include "core/mask/philox.h"
#include "core/problem/problem.h"

namespace tessera::reference {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kHiddenScore = -16777216;  // -2^24: a score no higher hides its key

// Element of an integer or boolean tensor.
inline int64_t load_integer(const Problem& p, const Buffers& b, int index, int64_t offset) {
  const void* data = b.data[index];
  switch (p.tensor[index].dtype) {
    case TESSERA_INT32:
      return static_cast<const int32_t*>(data)[offset];
    case TESSERA_INT64:
      return static_cast<const int64_t*>(data)[offset];
    default:
      return static_cast<const uint8_t*>(data)[offset] != 0;
  }
}

inline double load_real(const Problem& p, const Buffers& b, int index, int64_t offset) {
  return load_element(b.data[index], offset, p.tensor[index].dtype);
}

// One side of one sequence: its true length, the storage row of its first row or key, the position
// of that in the whole sequence, and its index on the axis of a dense mask or bias.
struct Side {
  int64_t length, batch, first, start, dense;
};

// The problem with its scalars resolved. Holds references only.
struct Question {
  const Problem& p;
  const Buffers& b;
  Sizes sizes;
  double scale, softcap;  // softcap 0 = off
  double off_by_one;      // 0 when that sink is on; otherwise unused
  Dropout dropout{};
  int64_t first_head = 0, head_stride = 0;  // dropout's word of head h is first + n * stride + h
  double dropout_scale = 1;

  Question(const Problem& problem, const Buffers& buffers)
      : p(problem), b(buffers), sizes(sizes_of(problem)) {
    scale = has(p, TESSERA_SOFTMAX_SCALE) ? b.softmax_scale
                                          : 1 / std::sqrt(static_cast<double>(sizes.dqk));
    softcap = has(p, TESSERA_SOFTCAP) ? b.softcap : 0;
    if (has(p, TESSERA_DROPOUT)) {
      const auto word = [&](int64_t i) { return at(TESSERA_RNG_STATE, i); };
      const auto threshold = static_cast<uint32_t>(std::floor(b.dropout_p * 65536 + 0.5));
      dropout = Dropout::make(word(0), word(1), threshold);
      const bool four = p.tensor[TESSERA_RNG_STATE].extent[0] == 4;
      first_head = four ? word(2) : 0;
      head_stride = four ? word(3) : sizes.hq;
      dropout_scale = dropout.scale();
    }
  }

  Side side(int64_t n, bool query) const {
    const int cu = query ? TESSERA_CU_SEQLENS_Q : TESSERA_CU_SEQLENS_K;
    const int padded = query ? TESSERA_CU_SEQLENS_Q_PADDED : TESSERA_CU_SEQLENS_K_PADDED;
    const int lens = query ? TESSERA_SEQLENS_Q : TESSERA_SEQLENS_K;
    const int starts = query ? TESSERA_Q_START : TESSERA_K_START;
    const int64_t start = given(p, starts) ? at(starts, n) : 0;
    if (query ? is_thd_q(p) : is_thd_k(p)) {
      const int64_t begin = at(cu, n), end = at(cu, n + 1);
      return {end - begin, 0, given(p, padded) ? at(padded, n) : begin, start, start};
    }
    return {given(p, lens) ? at(lens, n) : query ? sizes.sq : sizes.sk, n, 0, start, 0};
  }

  // The diagonal of the whole sequence.
  int64_t shift(int64_t n, const Side& q, const Side& k) const {
    switch (p.align) {
      case TESSERA_ALIGN_BOTTOM_RIGHT:
        return (k.start + k.length) - (q.start + q.length);
      case TESSERA_ALIGN_GIVEN:
        return given(p, TESSERA_SHIFT) ? at(TESSERA_SHIFT, n) : p.shift;
      default:
        return 0;
    }
  }

  // How far the window of sequence n reaches to a side: 0 is left, 1 right. -1: no bound.
  int64_t reach(int64_t n, int64_t side) const {
    return load_integer(p, b, TESSERA_WINDOWS, offset_of(p.tensor[TESSERA_WINDOWS], n, side));
  }

  // What element (n, row i, h) of q, k, v or do is multiplied by.
  double factor(int index, int64_t n, int64_t h, int64_t i) const {
    const bool keys = index == TESSERA_K || index == TESSERA_V;
    const int scale = keys                 ? TESSERA_K_SCALE + (index - TESSERA_K)
                      : index == TESSERA_Q ? TESSERA_Q_SCALE
                                           : TESSERA_DO_SCALE;
    if (!given(p, scale)) return 1;
    const Tensor& t = p.tensor[scale];
    const int32_t rows = keys ? p.k_scale_block : p.q_scale_block;
    const int64_t block = rows > 0 ? i / rows : 0;
    return load_real(p, b, scale,
                     offset_of(t, broadcast(t, 0, n), broadcast(t, 1, h), broadcast(t, 2, block)));
  }

  double sink(int64_t h) const {
    return given(p, TESSERA_SINK)
               ? load_real(p, b, TESSERA_SINK, h * p.tensor[TESSERA_SINK].stride[0])
               : 0;
  }

  // Offset of row `row` of k or v (index) for this sequence and kv head; pages are looked up.
  int64_t key_row(int index, const Side& keys, int64_t n, int64_t j, int64_t head) const {
    const Tensor& t = p.tensor[index];
    if (!is_paged(p)) return offset_of(t, keys.batch, keys.first + j, head);
    const bool own = index == TESSERA_V && given(p, TESSERA_PAGE_TABLE_V);
    const int table = own ? TESSERA_PAGE_TABLE_V : TESSERA_PAGE_TABLE_K;
    const int64_t page_size = p.tensor[TESSERA_K].extent[1];
    const int64_t page = load_integer(p, b, table, offset_of(p.tensor[table], n, j / page_size));
    return offset_of(t, page, j % page_size, head);
  }

 private:
  int64_t at(int index, int64_t i) const {
    return load_integer(p, b, index, i * p.tensor[index].stride[0]);
  }
};

// The band of a sequence, its rows and keys counted from 0.
class Diagonal {
 public:
  Diagonal(const Question& question, int64_t n, const Side& q, const Side& k)
      : p_(question.p),
        len_q_(q.length),
        len_k_(k.length),
        shift_(question.shift(n, q, k) + q.start - k.start) {
    if (has(p_, TESSERA_WINDOW)) left_ = p_.window_left, right_ = p_.window_right;
    if (has(p_, TESSERA_CAUSAL)) right_ = 0;
    if (given(p_, TESSERA_WINDOWS)) left_ = question.reach(n, 0), right_ = question.reach(n, 1);
  }

  bool shows(int64_t i, int64_t j) const {
    const int64_t at = i + shift_;  // the key under the query
    return i < len_q_ && j < len_k_ && (left_ < 0 || at - j <= left_) &&
           (right_ < 0 || j - at <= right_);
  }
  // To any row.
  bool shows(int64_t j) const {
    for (int64_t i = 0; i < len_q_; ++i) {
      if (shows(i, j)) return true;
    }
    return false;
  }
  int64_t distance(int64_t i, int64_t j) const { return std::abs(i + shift_ - j); }

 private:
  const Problem& p_;
  int64_t len_q_, len_k_, shift_;
  int64_t left_ = -1, right_ = -1;
};

// Which keys query i of (sequence n, head h) sees, and what is added to their scores.
class Row {
 public:
  Row(const Question& question, int64_t n, int64_t h, const Side& q, const Side& k)
      : question_(question), n_(n), h_(h), q_(q), k_(k), diagonal_(question, n, q, k) {
    const Problem& p = question.p;
    if (given(p, TESSERA_ALIBI_SLOPES)) {
      const Tensor& t = p.tensor[TESSERA_ALIBI_SLOPES];
      slope_ = load_real(p, question.b, TESSERA_ALIBI_SLOPES, offset_of(t, broadcast(t, 0, n), h));
    }
  }

  void move_to(int64_t i) { i_ = i; }

  bool visible(int64_t j) const {
    const Problem& p = question_.p;
    if (!diagonal_.shows(i_, j)) return false;
    if (given(p, TESSERA_MASK)) {
      const bool set = load_integer(p, question_.b, TESSERA_MASK, pair(TESSERA_MASK, j)) != 0;
      if (set == has(p, TESSERA_MASK_DROP)) return false;
    }
    if (given(p, TESSERA_KEY_RANGES) && !in_ranges(j)) return false;
    if (given(p, TESSERA_SEGMENT_IDS_Q)) {
      const Tensor &tq = p.tensor[TESSERA_SEGMENT_IDS_Q], &tk = p.tensor[TESSERA_SEGMENT_IDS_K];
      const int64_t own = load_integer(p, question_.b, TESSERA_SEGMENT_IDS_Q,
                                       offset_of(tq, q_.batch, q_.first + i_));
      const int64_t other = load_integer(p, question_.b, TESSERA_SEGMENT_IDS_K,
                                         offset_of(tk, k_.batch, k_.first + j));
      if (own != other) return false;
    }
    // A bias of -inf hides its key, in either position.
    return !given(p, TESSERA_BIAS) || bias(j) != -kInfinity;
  }

  double bias(int64_t j) const {
    return load_real(question_.p, question_.b, TESSERA_BIAS, pair(TESSERA_BIAS, j));
  }
  double slope() const { return slope_; }
  int64_t distance(int64_t j) const { return diagonal_.distance(i_, j); }

  bool kept(int64_t j) const {
    const auto wrapped = [](int64_t x) { return static_cast<uint32_t>(x); };  // modulo 2^32
    const uint32_t head_index =
        wrapped(question_.first_head) + wrapped(n_) * wrapped(question_.head_stride) + wrapped(h_);
    return question_.dropout.keep(head_index, q_.start + i_, k_.start + j);
  }

  // C-order index of the element of a tensor [b|1, hq|1, sq|1, sk|1] that key j reads.
  int64_t dense_index(int index, int64_t j) const {
    const Tensor& t = question_.p.tensor[index];
    const int64_t n = broadcast(t, 0, n_), h = broadcast(t, 1, h_);
    const int64_t i = broadcast(t, 2, q_.dense + i_);
    return ((n * t.extent[1] + h) * t.extent[2] + i) * t.extent[3] + broadcast(t, 3, k_.dense + j);
  }

 private:
  int64_t pair(int index, int64_t j) const {
    const Tensor& t = question_.p.tensor[index];
    return offset_of(t, broadcast(t, 0, n_), broadcast(t, 1, h_), broadcast(t, 2, q_.dense + i_),
                     broadcast(t, 3, k_.dense + j));
  }

  bool in_ranges(int64_t j) const {
    const Tensor& t = question_.p.tensor[TESSERA_KEY_RANGES];
    const int64_t row = offset_of(t, broadcast(t, 0, q_.batch), broadcast(t, 1, h_),
                                  broadcast(t, 2, q_.first + i_));
    for (int64_t r = 0; r + 1 < t.extent[3]; r += 2) {
      const int64_t start =
          load_integer(question_.p, question_.b, TESSERA_KEY_RANGES, row + r * t.stride[3]);
      const int64_t end =
          load_integer(question_.p, question_.b, TESSERA_KEY_RANGES, row + (r + 1) * t.stride[3]);
      if (start <= k_.start + j && k_.start + j < end) return true;
    }
    return false;
  }

  const Question& question_;
  int64_t n_, h_, i_ = 0;
  Side q_, k_;
  Diagonal diagonal_;
  double slope_ = 0;
};

}  // namespace tessera::reference
