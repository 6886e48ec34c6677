// SPDX-License-Identifier: Apache-2.0
//   x   = scale (<q, k> + pre), soft-capped, + post - slope * distance         visible keys only
//   m   = max(x, sink)   l = sum exp(x - m) + exp(sink - m)   p = exp(x - m) / l   lse = m + log l
//   o   = sum_j p~ v_j                         p~ = p * kept * dropout_scale
//   dx  = p (kept * dropout_scale * <do, v> - delta + dlse)                    delta = <do, o>
//   dv += p~ do    dq = scale sum_j dy k_j    dk += scale dy q          dy = dx / cosh^2(x / cap)
#include "conformance/reference/reference.h"

#include <algorithm>
#include <atomic>
#include <thread>

#include "conformance/reference/walk.h"
#include "core/problem/scales.h"

namespace tessera::reference {
namespace {

template <typename T>
class Pass : Walk<T> {
 public:
  Pass(const Question& question, Arithmetic arithmetic, ReferenceValues& out)
      : Walk<T>(question, out,
                arithmetic != Arithmetic::kExact && has(question.p, TESSERA_FP8_PRODUCTS)),
        low_(arithmetic == Arithmetic::kLow) {
    // Kernels multiply P with V in v's dtype when v is fp8, else in q's. Beside fp8 q, P forward is
    // E4M3 of 256 exp(x - m), and P and dS backward are bf16.
    const int32_t v_type = p_.tensor[TESSERA_V].dtype, q_type = p_.tensor[TESSERA_Q].dtype;
    fp8_ = is_fp8(q_type);
    product_type_ = !low_             ? TESSERA_FP64
                    : fp8_ || rounds_ ? TESSERA_BF16
                    : is_fp8(v_type)  ? v_type
                                      : q_type;
    do_type_ = rounds_ && low_ ? q_type : product_type_;
    sums_dp_terms_ = fp8_ || has(p_, TESSERA_FP8_PRODUCTS);
    if (!low_ && is_backward(p_) && (s_.hq != s_.hk || sums_dp_terms_)) sum_dk_dv_terms_ = true;
  }

  void forward(int64_t head_k) {
    this->for_each_row(
        head_k, [&](int64_t n, int64_t h, int64_t i) { forward_row(n, h, i); }, [](int64_t) {});
  }

  void backward(int64_t head_k, const std::vector<double>& o, const std::vector<double>& lse) {
    o_ = &o;
    lse_ = &lse;
    const auto row = [&](int64_t n, int64_t h, int64_t i) { backward_row(n, h, i); };
    this->for_each_row(head_k, row, [&](int64_t n) { this->flush_dk_dv(n, head_k); });
  }

 private:
  void forward_row(int64_t n, int64_t h, int64_t i) {
    (void)n;
    this->score_row(!low_);
    double& lse = out_.value[TESSERA_LSE][this->statistic_index(h, i)];
    T peak = static_cast<T>(-kInfinity);
    bool nan = false;
    for (T x : x_) peak = std::max(peak, x), nan |= x != x;
    if (!out_.value[TESSERA_MAX_LOGIT].empty()) {
      double& most = out_.value[TESSERA_MAX_LOGIT][h];
      most = std::max(most, static_cast<double>(peak));
    }
    if (!low_) {
      out_.terms[TESSERA_LSE][this->statistic_index(h, i)] = magnitude_;
      if (!out_.terms[TESSERA_MAX_LOGIT].empty()) {
        double& most = out_.terms[TESSERA_MAX_LOGIT][h];
        most = std::max(most, magnitude_);
      }
    }
    if (peak == static_cast<T>(-kInfinity) && !nan) {  // an empty row: o stays 0
      lse = has_sink(p_) ? question_.sink(h) : -kInfinity;
      return;
    }
    const T row_peak = peak;
    T sum = 0;
    if (has_sink(p_)) {
      const T sink = static_cast<T>(question_.sink(h));
      peak = std::max(peak, sink);
      sum = std::exp(sink - peak);
    }
    if (low_ && (fp8_ || rounds_)) {
      fp8_output(i, h, row_peak, peak, sum, lse);
      return;
    }
    for (T& x : x_) sum += x = std::exp(x - peak);
    lse = static_cast<double>(peak + std::log(sum));
    o_row_.assign(s_.dv, 0);
    for (size_t at = 0; at < keys_.size(); ++at) {
      const T weight = this->dropped(product(x_[at] / sum), keys_[at]);
      if (weight != 0) add_scaled(o_row_.data(), weight, &this->v()[keys_[at] * s_.dv], s_.dv);
    }
    std::copy(o_row_.begin(), o_row_.end(), &out_.value[TESSERA_O][this->row_index(i, h, s_.dv)]);
  }

  // o and lse of scores x_ whose largest is `row_peak`, or with a sink `peak`; `sum` holds the
  // sink's part.
  void fp8_output(int64_t i, int64_t h, T row_peak, T peak, T sum, double& lse) {
    o_row_.assign(s_.dv, 0);
    for (size_t at = 0; at < keys_.size(); ++at) {
      const T e = std::exp(x_[at] - row_peak);
      sum += std::exp(x_[at] - peak);
      const T weight =
          this->dropped(static_cast<T>(rounded(256 * e, TESSERA_E4M3)) / 256, keys_[at]);
      if (weight != 0) add_scaled(o_row_.data(), weight, &this->v()[keys_[at] * s_.dv], s_.dv);
    }
    lse = static_cast<double>(peak + std::log(sum));
    const T factor = std::exp(row_peak - peak) / sum;
    double* o = &out_.value[TESSERA_O][this->row_index(i, h, s_.dv)];
    for (int64_t c = 0; c < s_.dv; ++c) o[c] = factor * o_row_[c];
  }

  void backward_row(int64_t n, int64_t h, int64_t i) {
    const double lse = (*lse_)[this->statistic_index(h, i)];
    if (lse == -kInfinity) return;  // an empty row without a sink
    this->score_row(false);
    this->load_row(TESSERA_DO, i, h, s_.dv, do_row_);
    if (!fp8_) {
      for (T& x : do_row_) x = static_cast<T>(rounded(x, do_type_));
    }
    if (rounds_) {
      if (is_fp8(p_.tensor[TESSERA_DO].dtype)) {
        stored_do_ = do_row_;
      } else {
        this->rounded_row(do_row_, nullptr, nullptr, stored_do_);
      }
    }
    const std::vector<T>& d_o = this->d_o();
    o_row_.resize(s_.dv);
    for (int64_t c = 0; c < s_.dv; ++c)
      o_row_[c] = static_cast<T>((*o_)[this->row_index(i, h, s_.dv) + c]);
    const T delta = dot(d_o.data(), o_row_.data(), s_.dv);
    const T dlse = this->dlse_of(i, h);
    if (given(p_, TESSERA_DSINK)) {
      const T p = std::exp(static_cast<T>(question_.sink(h)) - static_cast<T>(lse));
      add_term(TESSERA_DSINK, h, p * (dlse - delta));
    }
    const T scale = static_cast<T>(question_.scale);
    const bool pre = has(p_, TESSERA_BIAS_PRE_SCALE);
    const T delta_terms =
        sums_dp_terms_ ? dot_of_absolutes(do_row_.data(), o_row_.data(), s_.dv) : T{0};
    dq_row_.assign(s_.dqk, 0);
    dq_terms_.assign(s_.dqk, 0);
    T lost = 0;  // of dy by rounding: k less its mean is what the rounded dS multiplies
    for (size_t at = 0; at < keys_.size(); ++at) {
      const int64_t j = keys_[at];
      const T p = std::exp(x_[at] - static_cast<T>(lse));
      const T weight = this->dropped(product(p), j);
      const T dp =
          weight == 0 ? T{0} : this->dropped(dot(d_o.data(), &this->v()[j * s_.dv], s_.dv), j);
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
      lost += dy - ds;
      add_scaled(&dk_[j * s_.dqk], ds, q_.data(), s_.dqk);
      if (!sum_dk_dv_terms_) continue;
      for (int64_t c = 0; c < s_.dv; ++c) dv_terms_[j * s_.dv + c] += std::abs(weight * do_row_[c]);
      T terms = std::abs(ds);
      if (sums_dp_terms_) {  // dP and delta cancel, and leave what each of them is off by
        const T absolute = dot_of_absolutes(do_row_.data(), &v_[j * s_.dv], s_.dv);
        terms = p * slope_of_cap_[at] * (this->dropped(absolute, j) + delta_terms);
      }
      for (int64_t c = 0; c < s_.dqk; ++c) {
        dk_terms_[j * s_.dqk + c] += terms * std::abs(q_[c]);
        dq_terms_[c] += terms * std::abs(k_[j * s_.dqk + c]);
      }
    }
    if (out_.value[TESSERA_DQ].empty()) return;
    double* dq = &out_.value[TESSERA_DQ][this->row_index(i, h, s_.dqk)];
    for (int64_t c = 0; rounds_ && c < s_.dqk; ++c) {
      dq_row_[c] += lost * static_cast<T>(this->mean_[c]);
    }
    for (int64_t c = 0; c < s_.dqk; ++c) dq[c] = scale * dq_row_[c];
    if (low_ || !sums_dp_terms_) return;
    double* dq_terms = &out_.terms[TESSERA_DQ][this->row_index(i, h, s_.dqk)];
    for (int64_t c = 0; c < s_.dqk; ++c) dq_terms[c] = scale * dq_terms_[c];
  }

  void add_term(int index, int64_t at, T term) {
    double& sum = out_.value[index][at];
    sum = static_cast<T>(sum) + term;
    if (!low_) out_.terms[index][at] += std::abs(term);
  }

  T product(T value) const { return static_cast<T>(rounded(value, product_type_)); }

  using Walk<T>::question_, Walk<T>::p_, Walk<T>::s_, Walk<T>::out_, Walk<T>::sum_dk_dv_terms_;
  using Walk<T>::rules_, Walk<T>::q_side_, Walk<T>::k_side_, Walk<T>::k_, Walk<T>::v_, Walk<T>::q_;
  using Walk<T>::do_row_, Walk<T>::o_row_, Walk<T>::dq_row_, Walk<T>::dk_, Walk<T>::dv_;
  using Walk<T>::dk_terms_, Walk<T>::dv_terms_, Walk<T>::keys_, Walk<T>::x_;
  using Walk<T>::slope_of_cap_, Walk<T>::magnitude_, Walk<T>::rounds_, Walk<T>::stored_do_;

  const bool low_;
  bool fp8_ = false;            // q
  bool sums_dp_terms_ = false;  // of products in fp8
  std::vector<T> dq_terms_;
  int32_t product_type_, do_type_;
  const std::vector<double>* o_ = nullptr;
  const std::vector<double>* lse_ = nullptr;
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

void round_results(const Problem& p, const Buffers& buffers, ReferenceValues& out) {
  for (int index = 0; index < TESSERA_NUM_TENSORS; ++index) {
    for (double& value : out.value[index]) value = rounded_as(p, buffers, index, value);
  }
}

template <typename T>
void run_forward(const Question& question, Arithmetic arithmetic, int num_threads,
                 ReferenceValues& out) {
  parallel_heads(question.sizes.hk, num_threads,
                 [&](int64_t head) { Pass<T>(question, arithmetic, out).forward(head); });
}

template <typename T>
void run_backward(const Question& question, Arithmetic arithmetic, int num_threads,
                  const std::vector<double>& o, const std::vector<double>& lse,
                  ReferenceValues& out) {
  const bool shared_dbias = given(question.p, TESSERA_DBIAS);
  parallel_heads(question.sizes.hk, shared_dbias ? 1 : num_threads,
                 [&](int64_t head) { Pass<T>(question, arithmetic, out).backward(head, o, lse); });
}

}  // namespace

double rounded_as(const Problem& p, const Buffers& buffers, int index, double value) {
  const int32_t dtype = p.tensor[index].dtype;
  if (!is_fp8(dtype)) return rounded(value, dtype);
  const double scale = scale_at(p, buffers, scale_of(index), 0, 0, 0);
  uint8_t slot = 0;
  store_scaled(&slot, 0, dtype, value, scale);
  return scale * load_element(&slot, 0, dtype);
}

double largest_of(const std::vector<double>& values) {
  double largest = 0;
  for (const double value : values) {
    if (!(std::abs(value) <= largest)) largest = std::abs(value);
    if (std::isnan(value)) return value;
  }
  return largest;
}

ReferenceValues reference_forward(const Problem& p, const Buffers& buffers, Arithmetic arithmetic,
                                  int num_threads, const ReferenceValues* held) {
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
    run_forward<double>(question, arithmetic, num_threads, out);
  } else {
    run_forward<float>(question, arithmetic, num_threads, out);
  }
  if (held) add_held(p, *held, out);
  if (low) round_results(p, buffers, out);
  return out;
}

ReferenceValues reference_backward(const Problem& p, const Buffers& buffers, Arithmetic arithmetic,
                                   int num_threads, const std::vector<double>& o,
                                   const std::vector<double>& lse, const ReferenceValues* held) {
  const Question question(p, buffers);
  const bool low = arithmetic == Arithmetic::kLow, gqa = question.sizes.hq != question.sizes.hk;
  ReferenceValues out;
  for (int index = TESSERA_DQ; index <= TESSERA_DALIBI_SLOPES; ++index) {
    if (!given(p, index)) continue;
    reset(p, index, 0, out.value[index]);
    const bool fp8 = is_fp8(p.tensor[TESSERA_Q].dtype) || has(p, TESSERA_FP8_PRODUCTS);
    const bool sum = index >= TESSERA_DBIAS || (gqa && index != TESSERA_DQ) || fp8;
    if (sum && !low) reset(p, index, 0, out.terms[index]);
  }
  if (low) {
    run_backward<float>(question, arithmetic, num_threads, o, lse, out);
  } else {
    run_backward<double>(question, arithmetic, num_threads, o, lse, out);
  }
  if (held) add_held(p, *held, out);
  if (low) round_results(p, buffers, out);
  return out;
}

}  // namespace tessera::reference
