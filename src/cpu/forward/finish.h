// SPDX-License-Identifier: Apache-2.0
// The end of a strip: o, lse and max_logit from its m, l and O^T.
#pragma once

#include "cpu/forward/scratch.h"

namespace tessera::cpu {
namespace {

TESSERA_INLINE void raise_max_logit(char* where, float x) {
  uint32_t seen, mine;
  memcpy(&mine, &x, sizeof mine);
  auto* word = reinterpret_cast<uint32_t*>(where);
  seen = __atomic_load_n(word, __ATOMIC_RELAXED);
  for (;;) {
    float old;
    memcpy(&old, &seen, sizeof old);
    if (!(x > old)) return;
    if (__atomic_compare_exchange_n(word, &seen, mine, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
      return;
    }
  }
}

// What the o that a row holds and the call's own weigh in both together, where outputs are added
// to; lse is the call's, and becomes that of both. held is 0 where o is not to be read.
struct Share {
  float held, own;
};
TESSERA_INLINE Share share_of(float before, float& lse) {
  if (before == -kInfinity) return {0.0f, 1.0f};
  const float top = lse > before ? lse : before;
  const float held = __builtin_exp2f((before - top) * kLog2e);
  const float own = __builtin_exp2f((lse - top) * kLog2e);
  lse = top + __builtin_log2f(held + own) * kLn2;
  return {held / (held + own), own / (held + own)};
}

// row[d..d + n) of a row of o, of which `held` remains, added to x.
template <typename S, typename T>
TESSERA_INLINE typename S::F with_held(const char* row, int64_t d, int n, float held,
                                       typename S::F x) {
  if (held == 0.0f) return x;
  return S::fma(S::load_n(reinterpret_cast<const T*>(row) + d, n), S::set1(held), x);
}

// o = factor O, and held times what it holds; held may be null.
template <typename S, int N, typename T>
__attribute__((noinline)) void store_rows(const Call& call, const CallSequence& sequence,
                                          const Strip<S>& strip, const float* factor,
                                          const float* held) {
  constexpr int L = S::kLanes;
  for (int v = 0; v < N; ++v) {
    const auto scale = S::load(factor + v * L);
    const auto empty = S::equal(scale, S::zero());  // 0 times what a NaN in V left is not 0
    const int count = smaller(strip.rows.count - v * L, L);
    char* row[L];
    for (int l = 0; l < L; ++l) {
      const int lane = v * L + l;
      row[l] = call.o.data + sequence.batch_q * call.o.batch +
               (sequence.first_q + strip.rows.token[lane]) * call.o.row +
               strip.rows.head[lane] * call.o.head;
    }
    for (int64_t d = 0; d < call.dv; d += L) {
      const int n = static_cast<int>(smaller<int64_t>(call.dv - d, L));
      typename S::F x[L];
      TESSERA_UNROLL
      for (int k = 0; k < L; ++k) {
        const auto sum = S::load(strip.o_t + ((d + k) * N + v) * L);
        x[k] = S::select(empty, S::zero(), S::mul(sum, scale));
      }
      S::transpose(x);
      for (int l = 0; held && l < count; ++l) {
        x[l] = with_held<S, T>(row[l], d, n, held[v * L + l], x[l]);
      }
      if (n == L && count == L) {
        TESSERA_UNROLL
        for (int l = 0; l < L; ++l) S::store(reinterpret_cast<T*>(row[l]) + d, x[l]);
      } else {
        for (int l = 0; l < count; ++l) S::store_n(reinterpret_cast<T*>(row[l]) + d, x[l], n);
      }
    }
  }
}

// o, lse and max_logit of a strip from its m, l and O^T.
template <typename S, int N>
void finish_strip(const Call& call, const CallSequence& sequence, const Strip<S>& strip) {
  alignas(64) float factor[Tile<S>::kStrip], held[Tile<S>::kStrip];
  for (int lane = 0; lane < N * S::kLanes; ++lane) {
    const bool real = lane < strip.rows.count;
    const int64_t head = strip.rows.head[lane];
    float m = strip.m[lane], l = strip.l[lane], shrink = 1.0f, sink = 0.0f;
    bool sink_leads = false;
    if (real && call.max_logit.data) {
      const float top = m * kLn2 + 0.0f;  // -0 becomes 0: the order of tasks must not show
      raise_max_logit(const_cast<char*>(at(call.max_logit, head)), top);
    }
    const bool saw = m > -kInfinity;
    if (call.has_sink) {
      if (call.sink.data) sink = load_scalar<S>(at(call.sink, head), call.sink.dtype);
      // A sink near the end of fp32 has no base-2 logit there.
      const float s = smaller(larger(sink * kLog2e, -kLargest), kLargest);
      sink_leads = !(m > s);
      const float top = sink_leads ? s : m;
      shrink = __builtin_exp2f(m - top);
      l = l * shrink + __builtin_exp2f(s - top);
      m = top;
    }
    const bool empty = !saw && l == l;
    factor[lane] = empty || l == 0 ? 0.0f : call.dropout_scale * shrink / l;
    float lse = -kInfinity;
    if (empty)
      lse = call.has_sink ? sink : lse;
    else
      lse = sink_leads ? sink + __builtin_log2f(l) * kLn2 : (m + __builtin_log2f(l)) * kLn2;
    if (real && call.lse.data) {
      char* to = const_cast<char*>(
          at(call.lse, sequence.batch_q, head, sequence.first_q + strip.rows.token[lane]));
      if (call.adds) {
        float before;
        memcpy(&before, to, sizeof before);
        const Share share = share_of(before, lse);
        held[lane] = share.held, factor[lane] *= share.own;
      }
      memcpy(to, &lse, sizeof lse);
    }
  }
  const float* kept = call.adds ? held : nullptr;
  switch (call.o.dtype) {
    case TESSERA_FP32:
      return store_rows<S, N, float>(call, sequence, strip, factor, kept);
    case TESSERA_BF16:
      return store_rows<S, N, Bf16>(call, sequence, strip, factor, kept);
    default:
      return store_rows<S, N, Fp16>(call, sequence, strip, factor, kept);
  }
}

}  // namespace
}  // namespace tessera::cpu
