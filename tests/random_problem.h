// SPDX-License-Identifier: Apache-2.0
// Problems of random extents, both passes, all formats and features, legal or not: what the sizes of
// every backend are asked with (sizes_test.cc, cuda/imagined/sizes_test.cc).
#pragma once

#include <algorithm>
#include <initializer_list>
#include <random>
#include <vector>

#include "tessera.h"

inline void give(tessera_problem& p, int index, int32_t dtype,
                 std::initializer_list<int64_t> extent) {
  tessera_tensor& t = p.tensor[index];
  t.dtype = dtype;
  std::fill(t.extent, t.extent + 4, 1);
  std::copy(extent.begin(), extent.end(), t.extent);
}

struct Extents {
  int64_t b, sq, sk, hq, hk, dqk, dv;
};

// All that is read is expanded, so that no extent is bounded by memory.
inline tessera_problem forward(const Extents& e, int32_t dtype = TESSERA_FP32) {
  tessera_problem p{};
  p.struct_size = sizeof p;
  give(p, TESSERA_Q, dtype, {e.b, e.sq, e.hq, e.dqk});
  give(p, TESSERA_K, dtype, {e.b, e.sk, e.hk, e.dqk});
  give(p, TESSERA_V, dtype, {e.b, e.sk, e.hk, e.dv});
  for (int i : {TESSERA_Q, TESSERA_K, TESSERA_V}) p.tensor[i].stride[3] = 1;
  return p;
}

inline int32_t describe(tessera_problem& p, std::initializer_list<int32_t> wanted,
                        tessera_error* e) {
  return tessera_outputs(&p, std::data(wanted), static_cast<int32_t>(wanted.size()), e);
}

class RandomProblems {
 public:
  // Extents of up to so many bits. in_units: most head dims are multiples of 8.
  struct Most {
    int rows, heads, dims;
    bool in_units;
  };
  RandomProblems(uint64_t seed, const Most& most) : random_(seed), most_(most) {}

  Extents extents{};  // of the problem that next() made

  // With outputs; false where they cannot be described.
  bool next(tessera_problem& p) {
    Extents& e = extents;
    e = {draw(most_.rows),      draw(most_.rows),     draw(most_.rows),    0,
         draw(most_.heads) + 1, draw(most_.dims) + 1, draw(most_.dims) + 1};
    if (most_.in_units) {
      e.dqk = (e.dqk + 7) / 8 * 8;
      e.dv = one_in(2) ? e.dqk : (e.dv + 7) / 8 * 8;
    }
    e.hq = e.hk * (draw(8) + 1);
    p = forward(e, std::vector{TESSERA_FP32, TESSERA_BF16, TESSERA_FP16, TESSERA_BF16,
                               TESSERA_E4M3}[random_() % 5]);
    const int format = static_cast<int>(random_() % 5);
    packed_ = format == 0, paged_ = format == 1;
    if (packed_) {
      p.format_q = p.format_kv = TESSERA_THD;
      for (int t : {TESSERA_Q, TESSERA_K, TESSERA_V}) p.tensor[t].extent[0] = 1;
      for (int t : {TESSERA_CU_SEQLENS_Q, TESSERA_CU_SEQLENS_K})
        give(p, t, TESSERA_INT64, {e.b + 1});
    } else if (paged_) {
      give(p, TESSERA_PAGE_TABLE_K, TESSERA_INT32, {e.b, draw(most_.rows) + 1});
      if (one_in(4)) p.tensor[TESSERA_PAGE_TABLE_V] = p.tensor[TESSERA_PAGE_TABLE_K];
      give(p, TESSERA_SEQLENS_K, TESSERA_INT32, {e.b});
      for (int t : {TESSERA_K, TESSERA_V}) p.tensor[t].extent[0] = draw(most_.rows) + 1;
    } else if (one_in(4)) {
      give(p, TESSERA_SEQLENS_K, TESSERA_INT32, {e.b});
    }
    if (one_in(2)) make_dense(p);
    shape_scores(p);
    return with_outputs(p);
  }

 private:
  bool one_in(unsigned n) { return random_() % n == 0; }
  int64_t draw(int most) {
    const int bits = static_cast<int>(random_() % 4 == 0 ? random_() % static_cast<unsigned>(most)
                                                         : random_() % 6);
    return static_cast<int64_t>(random_() % (uint64_t{2} << bits));
  }

  // Strides without gaps, where 63 bits hold them.
  static void make_dense(tessera_problem& p) {
    for (int i : {TESSERA_Q, TESSERA_K, TESSERA_V}) {
      tessera_tensor& t = p.tensor[i];
      int64_t stride = 1;
      for (int axis = 3; axis >= 0; --axis) {
        t.stride[axis] = stride;
        if (__builtin_mul_overflow(stride, t.extent[axis], &stride)) stride = 0;
      }
    }
  }

  // One feature or none, so that most problems have a backend that takes them.
  void shape_scores(tessera_problem& p) {
    const Extents& e = extents;
    const int64_t rows = packed_ ? 1 : e.sq, keys = packed_ || paged_ ? 1 : e.sk;
    const int64_t b = one_in(2) ? 1 : e.b, h = one_in(2) ? 1 : e.hq;
    switch (random_() % 12) {
      case 0:
        p.flags |= TESSERA_CAUSAL;
        p.align = TESSERA_ALIGN_BOTTOM_RIGHT;
        break;
      case 1:
        p.flags |= TESSERA_WINDOW;
        p.align = TESSERA_ALIGN_TOP_LEFT;
        p.window_left = draw(40), p.window_right = draw(40);
        break;
      case 2:
        give(p, TESSERA_MASK, TESSERA_BOOL, {b, h, one_in(4) ? 1 : rows, one_in(4) ? 1 : keys});
        break;
      case 3:
        give(p, TESSERA_BIAS, p.tensor[TESSERA_Q].dtype,
             {b, h, one_in(4) ? 1 : rows, one_in(4) ? 1 : keys});
        break;
      case 4:
        give(p, TESSERA_KEY_RANGES, TESSERA_INT32,
             {packed_ ? 1 : b, h, packed_ ? e.sq : rows, one_in(2) ? 2 : 4});
        break;
      case 5:
        if (paged_) break;
        give(p, TESSERA_SEGMENT_IDS_Q, TESSERA_INT32, {packed_ ? 1 : e.b, e.sq});
        give(p, TESSERA_SEGMENT_IDS_K, TESSERA_INT32, {packed_ ? 1 : e.b, e.sk});
        break;
      case 6:
        give(p, TESSERA_ALIBI_SLOPES, TESSERA_FP32, {b, e.hq});
        break;
      case 7:
        p.flags |= TESSERA_DROPOUT;
        give(p, TESSERA_RNG_STATE, TESSERA_INT64, {2});
        break;
      case 8:
        p.flags |= TESSERA_SOFTCAP;
        break;
      default:
        break;
    }
    if (one_in(8)) p.flags |= TESSERA_DETERMINISTIC;
    if (one_in(8)) p.flags |= TESSERA_BATCH_INVARIANT;
    if (one_in(8)) p.flags |= TESSERA_ACCUMULATE;
    if (one_in(4)) give(p, TESSERA_SINK, TESSERA_FP32, {e.hq});
  }

  bool with_outputs(tessera_problem& p) {
    if (one_in(2)) return describe(p, {TESSERA_O, TESSERA_LSE}, nullptr) == TESSERA_OK;
    p.pass = TESSERA_BACKWARD;
    std::vector<int32_t> wanted{TESSERA_O,  TESSERA_LSE, TESSERA_DO,
                                TESSERA_DQ, TESSERA_DK,  TESSERA_DV};
    const int pairs[][2] = {{TESSERA_SINK, TESSERA_DSINK},
                            {TESSERA_BIAS, TESSERA_DBIAS},
                            {TESSERA_ALIBI_SLOPES, TESSERA_DALIBI_SLOPES}};
    for (const auto& [input, gradient] : pairs)
      if (p.tensor[input].dtype != TESSERA_NONE && !one_in(4)) wanted.push_back(gradient);
    return tessera_outputs(&p, wanted.data(), static_cast<int32_t>(wanted.size()), nullptr) ==
           TESSERA_OK;
  }

  std::mt19937_64 random_;
  Most most_;
  bool packed_ = false, paged_ = false;
};
