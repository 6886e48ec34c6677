// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm80/products/problem.h"

#include <algorithm>

#include "core/problem/scales.h"
#include "cuda/sm80/choice.h"

namespace tessera::cuda::sm80 {
namespace {

constexpr int64_t kUnit = 4;  // columns of an access of the copies in fp32

int64_t up(int64_t columns) { return (columns + kUnit - 1) / kUnit * kUnit; }
int passes_for(int64_t columns, int64_t own) { return static_cast<int>((columns + own - 1) / own); }

}  // namespace

WideColumns wide_columns(const Problem& p, int64_t most) {
  const Sizes s = sizes_of(p);
  WideColumns c{};
  const bool backward = is_backward(p);
  if (has(p, TESSERA_SMOOTH_MEAN)) c.means = backward ? 1 : 3;
  c.first_q = up(s.dqk + c.means), c.first_do = up(s.dv);
  c.dqk = c.first_q, c.dv = s.dv;
  if (c.dqk > most || c.first_do > most) return c;
  c.passes = 1;
  if (!backward) return c;
  c.own_k = std::min(up(s.dqk), (most - c.first_q) / 2 / kUnit * kUnit);
  c.own_v = std::min(up(s.dv), (most - c.first_do) / kUnit * kUnit);
  c.dqk = c.first_q + 2 * c.own_k, c.dv = c.first_do + c.own_v;
  c.passes = c.own_k > 0 && c.own_v > 0
                 ? std::max(passes_for(s.dqk, c.own_k), passes_for(s.dv, c.own_v))
                 : 0;
  return c;
}

int64_t widest_head(const Problem& p, int shared_bytes) {
  constexpr int64_t kMost = 576, kMostOfSmall = 256;
  const bool fits = !is_backward(p) ||
                    find_kernel(Pass::dkdv, kGeneral, TESSERA_FP32, kMost, shared_bytes) != nullptr;
  return fits ? kMost : kMostOfSmall;
}

bool copies_o(const Problem& p) {
  return is_backward(p) || p.tensor[TESSERA_O].dtype != TESSERA_BF16 || given(p, TESSERA_AMAX_O);
}

bool copies_bias(const Problem& p) {
  if (!given(p, TESSERA_BIAS)) return false;
  const int32_t dtype = p.tensor[TESSERA_BIAS].dtype;
  return dtype != TESSERA_FP32 && (is_backward(p) || dtype != TESSERA_BF16);
}

Problem wide_problem(const Problem& p, const WideColumns& c) {
  Problem inner = problem_of_values(p);
  for (const int index : kScaledTensors) {
    if (!given(p, index)) continue;
    const bool scores =
        index == TESSERA_Q || index == TESSERA_K || index == TESSERA_DQ || index == TESSERA_DK;
    Tensor& t = inner.tensor[index];
    t.extent[3] = scores ? c.dqk : c.dv;
    const bool narrow = !is_backward(p) && index != TESSERA_O;
    t = dense_like(t, narrow ? TESSERA_BF16 : TESSERA_FP32);
  }
  if (!copies_o(p)) inner.tensor[TESSERA_O] = p.tensor[TESSERA_O];
  for (const int index : {TESSERA_BIAS, TESSERA_DBIAS}) {
    if (copies_bias(p) && given(p, index)) {
      inner.tensor[index] = dense_like(p.tensor[index], TESSERA_FP32);
    }
  }
  inner.flags &= ~(TESSERA_FP8_PRODUCTS | TESSERA_SMOOTH_MEAN | TESSERA_SMOOTH_HADAMARD);
  inner.flags |= TESSERA_SOFTMAX_SCALE;
  return inner;
}

}  // namespace tessera::cuda::sm80
