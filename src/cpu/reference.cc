// SPDX-License-Identifier: Apache-2.0
//   x   = scale (<q, k> + pre), soft-capped, + post - slope * distance         visible keys only
//   m   = max(x, sink)   l = sum exp(x - m) + exp(sink - m)   p = exp(x - m) / l   lse = m + log l
//   o   = sum_j p~ v_j                         p~ = p * kept * dropout_scale
//   dx  = p (kept * dropout_scale * <do, v> - delta + dlse)                    delta = <do, o>
//   dv += p~ do    dq = scale sum_j dy k_j    dk += scale dy q          dy = dx / cosh^2(x / cap)
#include "cpu/reference.h"

#include <algorithm>
#include <atomic>
#include <thread>

#include "cpu/reference_arithmetic.h"
#include "cpu/reference_rows.h"

namespace tessera::cpu {
namespace {

// One kv head at a time, every sequence and query head of it; heads never write the same element,
// but for a dbias that they share.
template <typename T>
class Pass {
 public:
  Pass(const Question& question, bool low, ReferenceValues& out)
      : question_(question), p_(question.p), s_(question.sizes), low_(low), out_(out) {
    // Kernels multiply P with V in v's dtype when v is fp8, else in q's.
    const int32_t v_type = p_.tensor[TESSERA_V].dtype, q_type = p_.tensor[TESSERA_Q].dtype;
    product_type_ = !low ? TESSERA_FP64 : is_fp8(v_type) ? v_type : q_type;
    if (!low && is_backward(p_) && s_.hq != s_.hk) sum_dk_dv_terms_ = true;
  }

  void forward(int64_t head_k) {
    for_each_row(
        head_k, [&](int64_t n, int64_t h, int64_t i) { forward_row(n, h, i); }, [](int64_t) {});
  }

  void backward(int64_t head_k, const std::vector<double>& o, const std::vector<double>& lse) {
    o_ = &o;
    lse_ = &lse;
    const auto row = [&](int64_t n, int64_t h, int64_t i) { backward_row(n, h, i); };
    for_each_row(head_k, row, [&](int64_t n) { flush_dk_dv(n, head_k); });
  }

 private:
  template <typename RowFunction, typename Finish>
  void for_each_row(int64_t head_k, RowFunction&& row, Finish&& finish) {
    for (int64_t n = 0; n < s_.batch; ++n) {
      q_side_ = question_.side(n, true);
      k_side_ = question_.side(n, false);
      load_keys(TESSERA_K, n, head_k, s_.dqk, k_);
      load_keys(TESSERA_V, n, head_k, s_.dv, v_);
      if (is_backward(p_)) {
        for (auto* sum : {&dk_, &dk_terms_}) sum->assign(k_side_.length * s_.dqk, 0);
        for (auto* sum : {&dv_, &dv_terms_}) sum->assign(k_side_.length * s_.dv, 0);
      }
      for (int64_t h = head_k * s_.group(); h < (head_k + 1) * s_.group(); ++h) {
        Row rules(question_, n, h, q_side_, k_side_);
        rules_ = &rules;
        for (int64_t i = 0; i < q_side_.length; ++i) {
          rules.move_to(i);
          load_row(TESSERA_Q, i, h, s_.dqk, q_);
          row(n, h, i);
        }
      }
      finish(n);
    }
  }

  void load_keys(int index, int64_t n, int64_t head, int64_t d, std::vector<T>& rows) {
    const int32_t dtype = p_.tensor[index].dtype;
    const int scale_index = index == TESSERA_K ? TESSERA_K_SCALE : TESSERA_V_SCALE;
    double factor = 1;
    if (given(p_, scale_index)) {
      const Tensor& t = p_.tensor[scale_index];
      factor = load_real(p_, question_.b, scale_index, offset_of(t, broadcast(t, 0, n), head));
    }
    rows.resize(k_side_.length * d);
    for (int64_t j = 0; j < k_side_.length; ++j) {
      const int64_t at = question_.key_row(index, k_side_, n, j, head);
      for (int64_t c = 0; c < d; ++c) {
        rows[j * d + c] =
            static_cast<T>(factor * load_element(question_.b.data[index], at + c, dtype));
      }
    }
  }

  void load_row(int index, int64_t i, int64_t h, int64_t d, std::vector<T>& row) {
    const int64_t at = offset_of(p_.tensor[index], q_side_.batch, q_side_.first + i, h);
    row.resize(d);
    for (int64_t c = 0; c < d; ++c) {
      row[c] =
          static_cast<T>(load_element(question_.b.data[index], at + c, p_.tensor[index].dtype));
    }
  }

  // keys_: the visible ones; x_: their scores; slope_of_cap_: d(capped) / d(scaled).
  void score_row(bool with_magnitude) {
    const T scale = static_cast<T>(question_.scale), cap = static_cast<T>(question_.softcap);
    const bool biased = given(p_, TESSERA_BIAS), pre = has(p_, TESSERA_BIAS_PRE_SCALE);
    const T slope = static_cast<T>(rules_->slope());
    keys_.clear(), x_.clear(), slope_of_cap_.clear();
    magnitude_ = 0;
    for (int64_t j = 0; j < k_side_.length; ++j) {
      if (!rules_->visible(j)) continue;
      const T bias = biased ? static_cast<T>(rules_->bias(j)) : T{0};
      const T* k = &k_[j * s_.dqk];
      const T distance = static_cast<T>(rules_->distance(j));
      T x = scale * (dot(q_.data(), k, s_.dqk) + (pre ? bias : T{0})), cap_slope = 1;
      if (cap > 0) {
        const T grown = std::cosh(x / cap);  // 1 - tanh^2 has no digits where tanh is all but 1
        cap_slope = 1 / (grown * grown);
        x = cap * std::tanh(x / cap);
      }
      x += (pre ? T{0} : bias) - slope * distance;
      keys_.push_back(j), x_.push_back(x), slope_of_cap_.push_back(cap_slope);
      if (!with_magnitude) continue;
      const double before = dot_of_absolutes(q_.data(), k, s_.dqk) + (pre ? std::abs(bias) : T{0});
      const double after = (pre ? 0.0 : std::abs(bias)) + std::abs(slope * distance);
      magnitude_ = std::max(magnitude_, question_.scale * before + after);
    }
  }

  void forward_row(int64_t n, int64_t h, int64_t i) {
    (void)n;
    score_row(!low_);
    double& lse = out_.value[TESSERA_LSE][statistic_index(h, i)];
    T peak = static_cast<T>(-kInfinity);
    bool nan = false;
    for (T x : x_) peak = std::max(peak, x), nan |= x != x;
    if (!out_.value[TESSERA_MAX_LOGIT].empty()) {
      double& most = out_.value[TESSERA_MAX_LOGIT][h];
      most = std::max(most, static_cast<double>(peak));
    }
    if (!low_) {
      out_.terms[TESSERA_LSE][statistic_index(h, i)] = magnitude_;
      if (!out_.terms[TESSERA_MAX_LOGIT].empty()) {
        double& most = out_.terms[TESSERA_MAX_LOGIT][h];
        most = std::max(most, magnitude_);
      }
    }
    if (peak == static_cast<T>(-kInfinity) && !nan) {  // an empty row: o stays 0
      lse = has_sink(p_) ? question_.sink(h) : -kInfinity;
      return;
    }
    T sum = 0;
    if (has_sink(p_)) {
      const T sink = static_cast<T>(question_.sink(h));
      peak = std::max(peak, sink);
      sum = std::exp(sink - peak);
    }
    for (T& x : x_) sum += x = std::exp(x - peak);
    lse = static_cast<double>(peak + std::log(sum));
    o_row_.assign(s_.dv, 0);
    for (size_t at = 0; at < keys_.size(); ++at) {
      const T weight = dropped(product(x_[at] / sum), keys_[at]);
      if (weight != 0) add_scaled(o_row_.data(), weight, &v_[keys_[at] * s_.dv], s_.dv);
    }
    std::copy(o_row_.begin(), o_row_.end(), &out_.value[TESSERA_O][row_index(i, h, s_.dv)]);
  }

  void backward_row(int64_t n, int64_t h, int64_t i) {
    const double lse = (*lse_)[statistic_index(h, i)];
    if (lse == -kInfinity) return;  // an empty row without a sink
    score_row(false);
    load_row(TESSERA_DO, i, h, s_.dv, do_row_);
    o_row_.resize(s_.dv);
    for (int64_t c = 0; c < s_.dv; ++c)
      o_row_[c] = static_cast<T>((*o_)[row_index(i, h, s_.dv) + c]);
    const T delta = dot(do_row_.data(), o_row_.data(), s_.dv);
    T dlse = 0;
    if (given(p_, TESSERA_DLSE)) {
      const int64_t at = offset_of(p_.tensor[TESSERA_DLSE], q_side_.batch, h, q_side_.first + i);
      dlse = static_cast<T>(load_real(p_, question_.b, TESSERA_DLSE, at));
    }
    if (given(p_, TESSERA_DSINK)) {
      const T p = std::exp(static_cast<T>(question_.sink(h)) - static_cast<T>(lse));
      add_term(TESSERA_DSINK, h, p * (dlse - delta));
    }
    const T scale = static_cast<T>(question_.scale);
    const bool pre = has(p_, TESSERA_BIAS_PRE_SCALE);
    dq_row_.assign(s_.dqk, 0);
    for (size_t at = 0; at < keys_.size(); ++at) {
      const int64_t j = keys_[at];
      const T p = std::exp(x_[at] - static_cast<T>(lse));
      const T weight = dropped(product(p), j);
      const T dp = weight == 0 ? T{0} : dropped(dot(do_row_.data(), &v_[j * s_.dv], s_.dv), j);
      const T dx = p * (dp - delta + dlse), dy = dx * slope_of_cap_[at];
      if (given(p_, TESSERA_DBIAS))
        add_term(TESSERA_DBIAS, rules_->dense_index(TESSERA_DBIAS, j), pre ? scale * dy : dx);
      if (given(p_, TESSERA_DALIBI_SLOPES)) {
        const Tensor& t = p_.tensor[TESSERA_DALIBI_SLOPES];
        const T distance = static_cast<T>(rules_->distance(j));
        add_term(TESSERA_DALIBI_SLOPES, broadcast(t, 0, n) * t.extent[1] + h, -distance * dx);
      }
      const T ds = product(dy);
      if (weight != 0) add_scaled(&dv_[j * s_.dv], weight, do_row_.data(), s_.dv);
      add_scaled(dq_row_.data(), ds, &k_[j * s_.dqk], s_.dqk);
      add_scaled(&dk_[j * s_.dqk], ds, q_.data(), s_.dqk);
      if (!sum_dk_dv_terms_) continue;
      for (int64_t c = 0; c < s_.dv; ++c) dv_terms_[j * s_.dv + c] += std::abs(weight * do_row_[c]);
      for (int64_t c = 0; c < s_.dqk; ++c) dk_terms_[j * s_.dqk + c] += std::abs(ds * q_[c]);
    }
    if (out_.value[TESSERA_DQ].empty()) return;
    double* dq = &out_.value[TESSERA_DQ][row_index(i, h, s_.dqk)];
    for (int64_t c = 0; c < s_.dqk; ++c) dq[c] = scale * dq_row_[c];
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
      for (int64_t j = 0; j < k_side_.length; ++j) {
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

  void add_term(int index, int64_t at, T term) {
    double& sum = out_.value[index][at];
    sum = static_cast<T>(sum) + term;
    if (!low_) out_.terms[index][at] += std::abs(term);
  }

  T dropped(T value, int64_t j) const {
    if (!has(p_, TESSERA_DROPOUT)) return value;
    return rules_->kept(j) ? value * static_cast<T>(question_.dropout_scale) : T{0};
  }
  T product(T value) const { return static_cast<T>(rounded(value, product_type_)); }

  // C-order indices into dense o, dq [b, sq, hq, d] and lse [b, hq, sq].
  int64_t row_index(int64_t i, int64_t h, int64_t d) const {
    return ((q_side_.batch * s_.sq + q_side_.first + i) * s_.hq + h) * d;
  }
  int64_t statistic_index(int64_t h, int64_t i) const {
    return (q_side_.batch * s_.hq + h) * s_.sq + q_side_.first + i;
  }

  const Question& question_;
  const Problem& p_;
  const Sizes& s_;
  const bool low_;
  ReferenceValues& out_;
  int32_t product_type_;
  bool sum_dk_dv_terms_ = false;
  const std::vector<double>* o_ = nullptr;
  const std::vector<double>* lse_ = nullptr;

  Row* rules_ = nullptr;
  Side q_side_{}, k_side_{};
  std::vector<T> k_, v_, q_, do_row_, o_row_, dq_row_;
  std::vector<T> dk_, dv_, dk_terms_, dv_terms_;
  std::vector<int64_t> keys_;
  std::vector<T> x_, slope_of_cap_;
  double magnitude_ = 0;
};

void parallel_heads(int64_t heads, int num_threads, const auto& body) {
  std::atomic<int64_t> next{0};
  const auto work = [&] {
    for (int64_t head; (head = next.fetch_add(1)) < heads;) body(head);
  };
  std::vector<std::thread> helpers;
  for (int64_t t = 1; t < std::min<int64_t>(num_threads, heads); ++t) helpers.emplace_back(work);
  work();
  for (std::thread& helper : helpers) helper.join();
}

void reset(const Problem& p, int index, double value, std::vector<double>& values) {
  values.assign(element_count(p.tensor[index], tensor_rule(index).rank), value);
}

void round_results(const Problem& p, ReferenceValues& out) {
  for (int index = 0; index < TESSERA_NUM_TENSORS; ++index) {
    for (double& value : out.value[index]) value = rounded(value, p.tensor[index].dtype);
  }
}

template <typename T>
void run_forward(const Question& question, bool low, int num_threads, ReferenceValues& out) {
  parallel_heads(question.sizes.hk, num_threads,
                 [&](int64_t head) { Pass<T>(question, low, out).forward(head); });
}

template <typename T>
void run_backward(const Question& question, bool low, int num_threads, const std::vector<double>& o,
                  const std::vector<double>& lse, ReferenceValues& out) {
  const bool shared_dbias = given(question.p, TESSERA_DBIAS);
  parallel_heads(question.sizes.hk, shared_dbias ? 1 : num_threads,
                 [&](int64_t head) { Pass<T>(question, low, out).backward(head, o, lse); });
}

}  // namespace

ReferenceValues reference_forward(const Problem& p, const Buffers& buffers, Arithmetic arithmetic,
                                  int num_threads) {
  const Question question(p, buffers);
  const Sizes& s = question.sizes;
  const bool low = arithmetic == Arithmetic::kLow;
  ReferenceValues out;
  const int64_t rows = (is_thd_q(p) ? 1 : s.batch) * s.sq * s.hq;
  out.value[TESSERA_O].assign(rows * s.dv, 0);
  out.value[TESSERA_LSE].assign(rows, -kInfinity);
  if (given(p, TESSERA_MAX_LOGIT)) out.value[TESSERA_MAX_LOGIT].assign(s.hq, -kInfinity);
  if (!low) {
    out.terms[TESSERA_LSE].assign(rows, 0);
    if (given(p, TESSERA_MAX_LOGIT)) out.terms[TESSERA_MAX_LOGIT].assign(s.hq, 0);
    run_forward<double>(question, low, num_threads, out);
  } else {
    run_forward<float>(question, low, num_threads, out);
    round_results(p, out);
  }
  return out;
}

ReferenceValues reference_backward(const Problem& p, const Buffers& buffers, Arithmetic arithmetic,
                                   int num_threads, const std::vector<double>& o,
                                   const std::vector<double>& lse) {
  const Question question(p, buffers);
  const bool low = arithmetic == Arithmetic::kLow, gqa = question.sizes.hq != question.sizes.hk;
  ReferenceValues out;
  for (int index = TESSERA_DQ; index <= TESSERA_DALIBI_SLOPES; ++index) {
    if (!given(p, index)) continue;
    reset(p, index, 0, out.value[index]);
    const bool sum = index >= TESSERA_DBIAS || (gqa && index != TESSERA_DQ);
    if (sum && !low) reset(p, index, 0, out.terms[index]);
  }
  if (low) {
    run_backward<float>(question, low, num_threads, o, lse, out);
    round_results(p, out);
  } else {
    run_backward<double>(question, low, num_threads, o, lse, out);
  }
  return out;
}

}  // namespace tessera::cpu
