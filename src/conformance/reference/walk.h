// SPDX-License-Identifier: Apache-2.0
// The walk over a problem that the reference and the floor of the error rule share: every sequence
// and head, row by row, with the keys that the row sees and their scores.
#pragma once

#include <algorithm>
#include <vector>

#include "conformance/reference/arithmetic.h"
#include "conformance/reference/reference.h"
#include "conformance/reference/rows.h"
#include "core/quantise/quantise.h"

namespace tessera::reference {

// One kv head at a time, every sequence and query head of it; heads never write the same element,
// but for a dbias that they share.
template <typename T>
class Walk {
 public:
  // rounds: products are those of q, k, v and do that precision="fp8" rounds.
  Walk(const Question& question, ReferenceValues& out, bool rounds = false)
      : question_(question),
        p_(question.p),
        s_(question.sizes),
        out_(out),
        rounds_(rounds),
        rotation_(question.p) {}

 protected:
  template <typename RowFunction, typename Finish>
  void for_each_row(int64_t head_k, RowFunction&& row, Finish&& finish) {
    for (int64_t n = 0; n < s_.batch; ++n) {
      n_ = n;
      q_side_ = question_.side(n, true);
      k_side_ = question_.side(n, false);
      load_keys(TESSERA_K, n, head_k, s_.dqk, k_);
      load_keys(TESSERA_V, n, head_k, s_.dv, v_);
      if (rounds_) round_keys_and_values();
      if (is_backward(p_)) {
        for (auto* sum : {&dk_, &dk_terms_}) sum->assign(k_side_.length * s_.dqk, 0);
        for (auto* sum : {&dv_, &dv_terms_}) sum->assign(k_side_.length * s_.dv, 0);
      }
      for (int64_t h = head_k * s_.group(); h < (head_k + 1) * s_.group(); ++h) {
        Row rules(question_, n, h, q_side_, k_side_);
        rules_ = &rules;
        for (int64_t i = 0; i < q_side_.length && !interrupted(); ++i) {
          rules.move_to(i);
          load_row(TESSERA_Q, i, h, s_.dqk, q_);
          if (rounds_) of_mean_ = rounded_row(q_, mean_.data(), &rotation_, stored_q_);
          row(n, h, i);
        }
      }
      finish(n);
    }
  }

  // Keys that the band hides from every row stay unread: their pages may not exist.
  void load_keys(int index, int64_t n, int64_t head, int64_t d, std::vector<T>& rows) {
    const int32_t dtype = p_.tensor[index].dtype;
    const Diagonal diagonal(question_, n, q_side_, k_side_);
    rows.assign(k_side_.length * d, 0);
    for (int64_t j = 0; j < k_side_.length; ++j) {
      if (!diagonal.shows(j)) continue;
      const int64_t at = question_.key_row(index, k_side_, n, j, head);
      const double factor = question_.factor(index, n, head, j);
      for (int64_t c = 0; c < d; ++c) {
        rows[j * d + c] =
            static_cast<T>(factor * load_element(question_.b.data[index], at + c, dtype));
      }
    }
  }

  void load_row(int index, int64_t i, int64_t h, int64_t d, std::vector<T>& row) {
    const int64_t at = offset_of(p_.tensor[index], q_side_.batch, q_side_.first + i, h);
    const double factor = question_.factor(index, n_, h, i);
    const int32_t dtype = p_.tensor[index].dtype;
    row.resize(d);
    for (int64_t c = 0; c < d; ++c) {
      row[c] = static_cast<T>(factor * load_element(question_.b.data[index], at + c, dtype));
    }
  }

  // ---- precision="fp8" ----

  // What products see of q, of k and v [keys, d], and of do.
  const std::vector<T>& q() const { return rounds_ ? stored_q_ : q_; }
  const std::vector<T>& k() const { return rounds_ ? stored_k_ : k_; }
  const std::vector<T>& v() const { return rounds_ ? stored_v_ : v_; }
  const std::vector<T>& d_o() const { return rounds_ ? stored_do_ : do_row_; }

  T rounded_row(const std::vector<T>& row, const float* mean, const Rotation* rotation,
                std::vector<T>& stored) const {
    std::vector<float> values(row.begin(), row.end());
    const float of_mean =
        round_query(values.data(), static_cast<int64_t>(row.size()), mean, rotation);
    stored.assign(values.begin(), values.end());
    return static_cast<T>(of_mean);
  }

  void round_keys_and_values() {
    const Diagonal diagonal(question_, n_, q_side_, k_side_);
    int64_t lo = 0, hi = k_side_.length;  // keys that some row sees; the others may hold anything
    while (lo < hi && !diagonal.shows(lo)) ++lo;
    while (lo < hi && !diagonal.shows(hi - 1)) --hi;
    std::vector<float> k(k_.begin(), k_.end()), v(v_.begin(), v_.end()), sum;
    const auto each_block = [&](const auto& visit) {
      for (int64_t begin = lo; begin < hi;) {
        const int64_t end = std::min(begin / kScaledKeys * kScaledKeys + kScaledKeys, hi);
        visit(begin, end - begin);
        begin = end;
      }
    };
    mean_.assign(s_.dqk, 0);
    if (has(p_, TESSERA_SMOOTH_MEAN) && lo < hi) {
      each_block([&](int64_t first, int64_t keys) {
        sum.assign(s_.dqk, 0);
        add_keys(&k[first * s_.dqk], keys, s_.dqk, sum.data());
        add_keys(sum.data(), 1, s_.dqk, mean_.data());
      });
      for (float& mean : mean_) mean /= static_cast<float>(hi - lo);
    }
    each_block([&](int64_t first, int64_t keys) {
      round_keys(&k[first * s_.dqk], keys, s_.dqk, mean_.data(), &rotation_);
      round_keys(&v[first * s_.dv], keys, s_.dv, nullptr, nullptr);
    });
    stored_k_.assign(k.begin(), k.end());
    stored_v_.assign(v.begin(), v.end());
  }

  // keys_: the visible ones with a score above kHiddenScore (or NaN); x_: their scores;
  // slope_of_cap_: d(capped) / d(scaled); magnitudes_, if asked for: the sums of absolute terms
  // behind the scores.
  void score_row(bool with_magnitude) {
    const T scale = static_cast<T>(question_.scale), cap = static_cast<T>(question_.softcap);
    const bool biased = given(p_, TESSERA_BIAS), pre = has(p_, TESSERA_BIAS_PRE_SCALE);
    const T slope = static_cast<T>(rules_->slope());
    keys_.clear(), x_.clear(), slope_of_cap_.clear(), magnitudes_.clear();
    magnitude_ = 0;
    for (int64_t j = 0; j < k_side_.length; ++j) {
      if (!rules_->visible(j)) continue;
      const T bias = biased ? static_cast<T>(rules_->bias(j)) : T{0};
      const T* k = &this->k()[j * s_.dqk];
      const T distance = static_cast<T>(rules_->distance(j));
      T x = scale * (dot(q().data(), k, s_.dqk) + of_mean_ + (pre ? bias : T{0})), cap_slope = 1;
      if (cap > 0) {
        const T grown = std::cosh(x / cap);  // 1 - tanh^2 has no digits where tanh is all but 1
        cap_slope = 1 / (grown * grown);
        x = cap * std::tanh(x / cap);
      }
      x += (pre ? T{0} : bias) - slope * distance;
      if (x <= static_cast<T>(kHiddenScore)) continue;
      keys_.push_back(j), x_.push_back(x), slope_of_cap_.push_back(cap_slope);
      if (!with_magnitude) continue;
      const double before = dot_of_absolutes(q().data(), k, s_.dqk) + (pre ? std::abs(bias) : T{0});
      const double after = (pre ? 0.0 : std::abs(bias)) + std::abs(slope * distance);
      magnitudes_.push_back(question_.scale * before + after);
      magnitude_ = std::max(magnitude_, magnitudes_.back());
    }
  }

  // Adds this sequence's dk and dv to their tensors; pages may be shared between sequences.
  void flush_dk_dv(int64_t n, int64_t head) {
    const auto flush = [&](int index, int input, int64_t d, T factor, const std::vector<T>& sums,
                           const std::vector<T>& terms) {
      if (out_.value[index].empty()) return;
      Tensor dense = p_.tensor[input];  // the same lookup on contiguous strides
      dense.stride[3] = 1;
      for (int axis = 2; axis >= 0; --axis)
        dense.stride[axis] = dense.stride[axis + 1] * dense.extent[axis + 1];
      Problem contiguous = p_;
      contiguous.tensor[input] = dense;
      const Question where(contiguous, question_.b);
      const Diagonal diagonal(question_, n, q_side_, k_side_);
      for (int64_t j = 0; j < k_side_.length; ++j) {
        if (!diagonal.shows(j)) continue;
        const int64_t to = where.key_row(input, k_side_, n, j, head);
        const auto add = [&](const std::vector<T>& from, std::vector<double>& sum) {
          for (int64_t c = 0; c < d; ++c)
            sum[to + c] = static_cast<T>(sum[to + c]) + factor * from[j * d + c];
        };
        add(sums, out_.value[index]);
        if (sum_dk_dv_terms_) add(terms, out_.terms[index]);
      }
    };
    flush(TESSERA_DK, TESSERA_K, s_.dqk, static_cast<T>(question_.scale), dk_, dk_terms_);
    flush(TESSERA_DV, TESSERA_V, s_.dv, 1, dv_, dv_terms_);
  }

  T dropped(T value, int64_t j) const {
    if (!has(p_, TESSERA_DROPOUT)) return value;
    return rules_->kept(j) ? value * static_cast<T>(question_.dropout_scale) : T{0};
  }

  // C-order indices into dense o, dq [b, sq, hq, d] and lse [b, hq, sq].
  int64_t row_index(int64_t i, int64_t h, int64_t d) const {
    return ((q_side_.batch * s_.sq + q_side_.first + i) * s_.hq + h) * d;
  }
  int64_t statistic_index(int64_t h, int64_t i) const {
    return (q_side_.batch * s_.hq + h) * s_.sq + q_side_.first + i;
  }

  bool interrupted() const { return question_.b.interrupt && *question_.b.interrupt != 0; }

  T dlse_of(int64_t i, int64_t h) const {
    if (!given(p_, TESSERA_DLSE)) return 0;
    const int64_t at = offset_of(p_.tensor[TESSERA_DLSE], q_side_.batch, h, q_side_.first + i);
    return static_cast<T>(load_real(p_, question_.b, TESSERA_DLSE, at));
  }

  const Question& question_;
  const Problem& p_;
  const Sizes& s_;
  ReferenceValues& out_;
  const bool rounds_;
  const Rotation rotation_;
  bool sum_dk_dv_terms_ = false;

  int64_t n_ = 0;
  Row* rules_ = nullptr;
  Side q_side_{}, k_side_{};
  std::vector<T> k_, v_, q_, do_row_, o_row_, dq_row_;
  std::vector<T> dk_, dv_, dk_terms_, dv_terms_;
  std::vector<T> stored_q_, stored_k_, stored_v_, stored_do_;
  std::vector<float> mean_;  // of the keys of the sequence and head
  T of_mean_ = 0;            // <q_, mean_>
  std::vector<int64_t> keys_;
  std::vector<T> x_, slope_of_cap_;
  std::vector<double> magnitudes_;
  double magnitude_ = 0;
};

}  // namespace tessera::reference
