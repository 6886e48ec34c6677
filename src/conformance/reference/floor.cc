// SPDX-License-Identifier: Apache-2.0
// N of the error rule's floor: how far an element may move, to first order and with every sign
// against it, when the numbers behind it move by one unit of what makes them up. With
//   e   = scale (sum |q||k| + |pre|) + |post| + |slope distance| + |lse|       of a score x
//   A   = sum |do v| kept dropout_scale        of dP        B = sum |do o|     of delta
// and moves of e, A and B:
//   o   : sum_j p e |kept dropout_scale v - o|           dv  : sum_i p~ e |do|
//   dx  : p e |dP - delta + dlse| + p (A + B)            dy  : |d(dx)| s + |dx| |ds/dx| e
//   dq  : scale sum_j |d(dy)| |k|                        dk  : scale sum_i |d(dy)| |q|
// with s = 1 / cosh^2(x / cap) and |ds/dx| = 2 sqrt(1 - s) s / cap.
#include "conformance/reference/walk.h"

namespace tessera::reference {
namespace {

void add_absolutes(double* to, double factor, const double* from, int64_t d) {
  for (int64_t c = 0; c < d; ++c) to[c] += std::abs(factor * from[c]);
}

class Floor : Walk<double> {
 public:
  using Walk::Walk;

  void forward(int64_t head_k) {
    for_each_row(
        head_k, [&](int64_t, int64_t h, int64_t i) { forward_row(h, i); }, [](int64_t) {});
  }

  void backward(int64_t head_k, const std::vector<double>& o, const std::vector<double>& lse) {
    o_ = &o;
    lse_ = &lse;
    const auto row = [&](int64_t n, int64_t h, int64_t i) { backward_row(n, h, i); };
    for_each_row(head_k, row, [&](int64_t n) { flush_dk_dv(n, head_k); });
  }

 private:
  void forward_row(int64_t h, int64_t i) {
    score_row(true);
    double peak = has_sink(p_) ? question_.sink(h) : -kInfinity;
    for (double x : x_) peak = std::max(peak, x);
    if (peak == -kInfinity) return;
    double sum = has_sink(p_) ? std::exp(question_.sink(h) - peak) : 0;
    for (double& x : x_) sum += x = std::exp(x - peak);
    const double lse = std::abs(peak + std::log(sum));
    o_row_.assign(s_.dv, 0);
    for (size_t at = 0; at < keys_.size(); ++at) {
      add_scaled(o_row_.data(), dropped(x_[at] / sum, keys_[at]), &v_[keys_[at] * s_.dv], s_.dv);
    }
    double* floor = &out_.value[TESSERA_O][row_index(i, h, s_.dv)];
    for (size_t at = 0; at < keys_.size(); ++at) {
      const double moved = x_[at] / sum * (magnitudes_[at] + lse);
      const double kept = dropped(1, keys_[at]);
      const double* v = &v_[keys_[at] * s_.dv];
      for (int64_t c = 0; c < s_.dv; ++c) floor[c] += moved * std::abs(kept * v[c] - o_row_[c]);
    }
  }

  void backward_row(int64_t n, int64_t h, int64_t i) {
    const double lse = (*lse_)[statistic_index(h, i)];
    if (lse == -kInfinity) return;
    score_row(true);
    load_row(TESSERA_DO, i, h, s_.dv, do_row_);
    const double* o = &(*o_)[row_index(i, h, s_.dv)];
    const double delta = dot(do_row_.data(), o, s_.dv) - dlse_of(i, h);
    const double delta_terms = dot_of_absolutes(do_row_.data(), o, s_.dv);
    if (given(p_, TESSERA_DSINK)) {
      const double sink = question_.sink(h);
      const double moved = std::abs(delta) * (std::abs(sink) + std::abs(lse)) + delta_terms;
      out_.value[TESSERA_DSINK][h] += std::exp(sink - lse) * moved;
    }
    dq_row_.assign(s_.dqk, 0);
    for (size_t at = 0; at < keys_.size(); ++at) backward_pair(n, h, at, lse, delta, delta_terms);
    if (out_.value[TESSERA_DQ].empty()) return;
    double* dq = &out_.value[TESSERA_DQ][row_index(i, h, s_.dqk)];
    for (int64_t c = 0; c < s_.dqk; ++c) dq[c] = question_.scale * dq_row_[c];
  }

  void backward_pair(int64_t n, int64_t h, size_t at, double lse, double delta,
                     double delta_terms) {
    const int64_t j = keys_[at];
    const double p = std::exp(x_[at] - lse), e = magnitudes_[at] + std::abs(lse);
    const double kept = dropped(1, j), slope = slope_of_cap_[at];
    const double* v = &v_[j * s_.dv];
    const double dx = p * (kept * dot(do_row_.data(), v, s_.dv) - delta);
    const double terms = kept * dot_of_absolutes(do_row_.data(), v, s_.dv) + delta_terms;
    const double moved_dx = std::abs(dx) * e + p * terms;
    const double bend = question_.softcap > 0
                            ? 2 * std::sqrt(std::max(1 - slope, 0.0)) * slope / question_.softcap
                            : 0;
    const double moved_dy = moved_dx * slope + std::abs(dx) * bend * e;
    if (given(p_, TESSERA_DBIAS)) {
      out_.value[TESSERA_DBIAS][rules_->dense_index(TESSERA_DBIAS, j)] +=
          has(p_, TESSERA_BIAS_PRE_SCALE) ? question_.scale * moved_dy : moved_dx;
    }
    if (given(p_, TESSERA_DALIBI_SLOPES)) {
      const Tensor& t = p_.tensor[TESSERA_DALIBI_SLOPES];
      out_.value[TESSERA_DALIBI_SLOPES][broadcast(t, 0, n) * t.extent[1] + h] +=
          static_cast<double>(rules_->distance(j)) * moved_dx;
    }
    add_absolutes(&dv_[j * s_.dv], kept * p * e, do_row_.data(), s_.dv);
    add_absolutes(dq_row_.data(), moved_dy, &k_[j * s_.dqk], s_.dqk);
    add_absolutes(&dk_[j * s_.dqk], moved_dy, q_.data(), s_.dqk);
  }

  const std::vector<double>* o_ = nullptr;
  const std::vector<double>* lse_ = nullptr;
};

}  // namespace

ReferenceValues reference_floor(const Problem& p, const Buffers& buffers,
                                const std::vector<double>& o, const std::vector<double>& lse) {
  const Question question(p, buffers);
  ReferenceValues out;
  const int first = is_backward(p) ? TESSERA_DQ : TESSERA_O;
  const int last = is_backward(p) ? TESSERA_DALIBI_SLOPES : TESSERA_O;
  for (int index = first; index <= last; ++index) {
    if (given(p, index)) {
      out.value[index].assign(element_count(p.tensor[index], tensor_rule(index).rank), 0);
    }
  }
  for (int64_t head = 0; head < question.sizes.hk; ++head) {
    Floor floor(question, out);
    is_backward(p) ? floor.backward(head, o, lse) : floor.forward(head);
  }
  return out;
}

}  // namespace tessera::reference
