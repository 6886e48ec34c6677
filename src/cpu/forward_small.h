// SPDX-License-Identifier: Apache-2.0
// P of a short sequence in fp32, from scores in fp64: see score_small.h.
#pragma once

#include "cpu/forward_scratch.h"
#include "cpu/score_small.h"

namespace tessera::cpu {
namespace {

// Whether a sequence is weighed so: of itself, so that its results do not depend on its neighbours.
TESSERA_INLINE bool is_small(const Call& call, const CallSequence& sequence) {
  return call.q.dtype == TESSERA_FP32 &&
         sequence.band.len_q * sequence.band.len_k * call.hq <= kSmallForward;
}

// P^T = exp2(x log2(e) - m') from Q and K as the caller has them; m, l and alpha follow.
template <typename S, int N>
__attribute__((noinline)) void weigh_small(const Call& call, const CallSequence& sequence,
                                           ForwardScratch<S>& scratch, Strip<S>& strip) {
  constexpr int kLanes = N * S::kLanes, kBlock = Tile<S>::kBlock;
  const Visible<S>& visible = scratch.visible;
  const SmallScores<S> pairs{call, sequence, strip.rows, scratch.block.keys, visible};
  for (int64_t j = visible.first; j < round_up(visible.last, 4); ++j) {
    for (int l = 0; l < kLanes; ++l) scratch.scores[j * kLanes + l] = 0.0f;
  }
  for (int l = 0; l < kLanes; ++l) scratch.alpha[l] = 1.0f;
  for (int l = 0; l < strip.rows.count; ++l) {
    const char* q = call.q.data + sequence.batch_q * call.q.batch +
                    (sequence.first_q + strip.rows.token[l]) * call.q.row +
                    strip.rows.head[l] * call.q.head;
    double x[kBlock], sum = 0, peak = strip.m[l];
    for (int j = visible.first; j < visible.last; ++j) {
      if (!pairs.sees(l, j)) continue;
      const double s =
          dot_exactly(reinterpret_cast<const float*>(q),
                      reinterpret_cast<const float*>(scratch.block.k_rows[j]), call.dqk);
      x[j] = pairs.score(l, j, s, nullptr) * 1.4426950408889634;
      peak = larger(peak, x[j]);
    }
    const double base = peak == -SmallScores<S>::kNone ? 0 : peak;
    for (int j = visible.first; j < visible.last; ++j) {
      if (!pairs.sees(l, j)) continue;
      const double p = __builtin_exp2(x[j] - base);
      sum += p;
      if (pairs.keeps(scratch.keep[0], Tile<S>::kStrip, l, j)) {
        scratch.scores[j * kLanes + l] = static_cast<float>(p);
      }
    }
    const double shrink = __builtin_exp2(strip.m[l] - base);
    scratch.alpha[l] = static_cast<float>(shrink);
    strip.l[l] = static_cast<float>(strip.l[l] * shrink + sum);
    strip.m[l] = static_cast<float>(peak);
  }
}

}  // namespace
}  // namespace tessera::cpu
