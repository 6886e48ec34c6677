// SPDX-License-Identifier: Apache-2.0
// What the rich kernel does to a block of scores beyond the lean one, one function a feature, over
// the fragment of one warpgroup: bias, softcap, ALiBi, dense masks, key ranges, segments, dropout.
// Everything is switched by uniform run-time branches.
//
// A thread has two rows, r = 0 and 1, eight apart, and of each the elements e = 0, 1, ... at
// columns 8 (e / 2) + e % 2 from its first one. S[4 (e / 2) + 2 r + e % 2] is element e of row r.
#pragma once

#include <type_traits>

#include "core/philox.h"
#include "cuda/common/element.cuh"
#include "cuda/sm90/blocks.cuh"
#include "cuda/sm90/fragment.cuh"
#include "cuda/sm90/output.cuh"

namespace tessera::cuda::sm90 {

template <typename Element, int kTileN>
class Features {
 public:
  static constexpr int kElements = kTileN / 4;  // of a row that a thread holds
  using MaskWord = std::conditional_t<kTileN == 64, uint16_t, uint32_t>;

  __device__ __forceinline__ Features(const ForwardParams& a, const Work& work, int row, int lane)
      : a_(a), p_(a.problem), work_(work), row_(row), quad_(lane % 4) {
    const View& slopes = p_.tensor[TESSERA_ALIBI_SLOPES];
    if (slopes.data) {
      slope_ = kLog2e * load_float(slopes.data, offset_of(slopes, work.n, work.head), slopes.dtype);
    }
  }

  // What scores are multiplied by before exp2: 1 where shape() has left them in units of log2.
  static __device__ __forceinline__ float exponent_scale(const Params& p) {
    const bool shaped = (p.flags & TESSERA_SOFTCAP) || p.tensor[TESSERA_ALIBI_SLOPES].data ||
                        (p.tensor[TESSERA_BIAS].data && !(p.flags & TESSERA_BIAS_PRE_SCALE));
    return shaped ? 1.f : log2_scale(p);
  }

  // Bias of a block as 16-bit pairs: that of row r and group g is bias[2 g + r]. An fp32 bias comes
  // in two halves, of which this is the first; a rounding of 2^-16 of a bias is far below that of
  // P. Queued before S is waited for, so that both arrive together.
  __device__ __forceinline__ void load_bias(int block, uint32_t (&bias)[kElements]) const {
    const View& view = p_.tensor[TESSERA_BIAS];
    if (!view.data) return;
    if (view.dtype == TESSERA_FP32) {
      load_fp32_bias(block, kHigh, bias);
    } else if (view.vector_bytes == 16 && view.stride[3] == 1) {
      load_vectors(block, bias);
    } else {
      load_elements(block, bias);
    }
  }

  // Scores to x of docs/semantics.md without the masks; in units of log2, see exponent_scale().
  __device__ __forceinline__ void shape(int block, uint32_t (&bias)[kElements],
                                        float (&S)[kTileN / 2]) const {
    const bool has_bias = p_.tensor[TESSERA_BIAS].data,
               alibi = p_.tensor[TESSERA_ALIBI_SLOPES].data;
    const bool pre = has_bias && (p_.flags & TESSERA_BIAS_PRE_SCALE), post = has_bias && !pre;
    const bool softcap = p_.flags & TESSERA_SOFTCAP;
    if (softcap && !pre) cap(S, false);
    if (has_bias) {
      const float c = pre || softcap ? 1.f : log2_scale(p_);
      add_bias(block, c, post ? kLog2e : 1.f, bias, S);
    }
    if (softcap && pre) cap(S, true);
    if (alibi) add_alibi(block, post || softcap ? 1.f : log2_scale(p_), S);
  }

  // S = -inf where a key is hidden. keys: of the band, for both rows.
  __device__ __forceinline__ void hide(const KeyInterval (&keys)[2], int block,
                                       float (&S)[kTileN / 2]) const {
    const int column = block * kTileN + 2 * quad_;  // of element 0
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      uint32_t visible = element_bits(keys[r].lo - column, keys[r].hi - column);
      if (work_.exists(row_ + 8 * r)) visible &= visible_data(row_ + 8 * r, block, column);
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        float& s = S[4 * (e / 2) + 2 * r + e % 2];
        s = visible >> e & 1 ? s : -kInfinity;
      }
    }
  }

  // P = 0 where dropout says so. One Philox call decides what a thread holds of a 16 x 16 patch.
  __device__ __forceinline__ void drop(int block, uint32_t (&P)[kElements]) const {
    const View& state = p_.tensor[TESSERA_RNG_STATE];
    const int64_t* words = static_cast<const int64_t*>(state.data);
    const Dropout dropout = Dropout::make(words[0], words[state.stride[0]], p_.dropout_threshold);
    const uint32_t head = static_cast<uint32_t>(work_.n) * p_.hq + work_.head;
    const uint32_t patch_row = row_ / 16 * 8 + row_ % 8;
#pragma unroll
    for (int i = 0; i < kTileN / 16; ++i) {
      const uint32_t patch_column = (block * (kTileN / 16) + i) * 4 + quad_;
      const Philox4 random =
          philox4x32_7(dropout.key0, dropout.key1, dropout.counter0, head, patch_row, patch_column);
#pragma unroll
      for (int word = 0; word < 4; ++word) {  // row word / 2, group 2 i + word % 2
        const uint32_t low = (random.word[word] & 0xffff) >= dropout.threshold ? 0x0000ffffu : 0;
        const uint32_t high = random.word[word] >> 16 >= dropout.threshold ? 0xffff0000u : 0;
        P[2 * (2 * i + word % 2) + word / 2] &= low | high;
      }
    }
  }

 private:
  // ---- bias ----

  enum Half { kHigh, kLow };

  __device__ __forceinline__ const void* row_of_bias(int row, int bytes) const {
    const View& view = p_.tensor[TESSERA_BIAS];
    return static_cast<const char*>(view.data) + offset_of(view, work_.n, work_.head, row) * bytes;
  }
  // Columns of the row that may be read.
  __device__ __forceinline__ int end_of_bias(int row) const {
    return work_.exists(row) ? work_.k.length : 0;
  }

  // Each thread of a quad loads 8 columns of every fourth group and trades them for 2 of each.
  __device__ __forceinline__ void load_vectors(int block, uint32_t (&bias)[kElements]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const auto* row = static_cast<const uint16_t*>(row_of_bias(row_ + 8 * r, 2));
      const int end = end_of_bias(row_ + 8 * r);
#pragma unroll
      for (int g = 0; g < kTileN / 8; g += 4) {
        const int key = block * kTileN + 8 * (g + quad_);
        uint32_t x[4] = {};
        if (key + 8 <= end) {
          const uint4 v = *reinterpret_cast<const uint4*>(row + key);
          x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
        } else {
#pragma unroll
          for (int i = 0; i < 7; ++i) {
            if (key + i < end) x[i / 2] |= static_cast<uint32_t>(row[key + i]) << (i % 2 * 16);
          }
        }
        transpose_quad(x, quad_);
#pragma unroll
        for (int i = 0; i < 4; ++i) bias[(g + i) * 2 + r] = x[i];
      }
    }
  }

  // Rows of any alignment, and a bias that is one value a row.
  __device__ __forceinline__ void load_elements(int block, uint32_t (&bias)[kElements]) const {
    const int column = block * kTileN + 2 * quad_;
    const bool one_value = p_.tensor[TESSERA_BIAS].stride[3] == 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const auto* row = static_cast<const uint16_t*>(row_of_bias(row_ + 8 * r, 2));
      const int end = end_of_bias(row_ + 8 * r);
#pragma unroll
      for (int g = 0; g < kTileN / 8; ++g) {
        const int key = column + 8 * g;
        const uint32_t low = key < end ? row[one_value ? 0 : key] : 0;
        const uint32_t high = key + 1 < end ? row[one_value ? 0 : key + 1] : 0;
        bias[2 * g + r] = low | high << 16;
        if (g % kLoadsAtOnce == kLoadsAtOnce - 1) no_loads_across();
      }
    }
  }

  __device__ __forceinline__ void load_fp32_bias(int block, Half half,
                                                 uint32_t (&bias)[kElements]) const {
    const int column = block * kTileN + 2 * quad_;
    const bool one_value = p_.tensor[TESSERA_BIAS].stride[3] == 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const auto* row = static_cast<const float*>(row_of_bias(row_ + 8 * r, 4));
      const int end = end_of_bias(row_ + 8 * r);
#pragma unroll
      for (int g = 0; g < kTileN / 8; ++g) {
        const int key = column + 8 * g;
        const float low = key < end ? row[one_value ? 0 : key] : 0.f;
        const float high = key + 1 < end ? row[one_value ? 0 : key + 1] : 0.f;
        bias[2 * g + r] = half == kHigh
                              ? __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632)
                              : pack<__nv_bfloat16>(low_half(low), low_half(high));
        if (g % kLoadsAtOnce == kLoadsAtOnce - 1) no_loads_across();
      }
    }
  }
  // What the upper 16 bits of x leave out.
  static __device__ __forceinline__ float low_half(float x) {
    return isinf(x) ? 0.f : x - __uint_as_float(__float_as_uint(x) & 0xffff0000u);
  }

  // S = c S + factor * bias.
  __device__ __forceinline__ void add_bias(int block, float c, float factor,
                                           uint32_t (&bias)[kElements],
                                           float (&S)[kTileN / 2]) const {
    if (p_.tensor[TESSERA_BIAS].dtype == TESSERA_FP32) {
      add_pairs<__nv_bfloat16>(c, factor, bias, S);
      load_fp32_bias(block, kLow, bias);
      add_pairs<__nv_bfloat16>(1.f, factor, bias, S);
    } else {
      add_pairs<Element>(c, factor, bias, S);
    }
  }
  template <typename Bias>
  static __device__ __forceinline__ void add_pairs(float c, float factor,
                                                   const uint32_t (&bias)[kElements],
                                                   float (&S)[kTileN / 2]) {
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      float* pair = S + 4 * (i / 2) + 2 * (i % 2);
      pair[0] = fmaf(pair[0], c, factor * to_float<Bias>(bias[i] & 0xffff));
      pair[1] = fmaf(pair[1], c, factor * to_float<Bias>(bias[i] >> 16));
    }
  }
  template <typename Bias>
  static __device__ __forceinline__ float to_float(uint32_t bits) {
    if constexpr (std::is_same_v<Bias, __nv_bfloat16>) return __uint_as_float(bits << 16);
    return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
  }

  // ---- softcap and ALiBi ----

  // S = log2(e) * softcap * tanh(softmax_scale S / softcap).
  __device__ __forceinline__ void cap(float (&S)[kTileN / 2], bool may_be_hidden) const {
    const float y_scale = p_.softmax_scale / p_.softcap, x_scale = kLog2e * p_.softcap;
    float largest = 0;
#pragma unroll
    for (int i = 0; i < kTileN / 2; ++i) largest = fmaxf(largest, fabsf(S[i]));
    // Scores are small beside the cap in most problems. There a polynomial on the idle FMA pipe
    // does, off by 4e-7 of the cap; the exponential unit is the busiest of the kernel.
    constexpr float kSmall = 0.4f;
    if (__all_sync(kAllLanes, largest * y_scale <= kSmall)) {
#pragma unroll
      for (int i = 0; i < kTileN / 2; ++i) {
        const float y = S[i] * y_scale, y2 = y * y;
        float t = fmaf(y2, 62.f / 2835, -17.f / 315);
        t = fmaf(y2, t, 2.f / 15);
        t = fmaf(y2, t, -1.f / 3);
        t = fmaf(y2, t, 1.f);
        S[i] = x_scale * y * t;
      }
      return;
    }
    const float e_scale = 2 * kLog2e * y_scale;
#pragma unroll
    for (int i = 0; i < kTileN / 2; ++i) {
      const float t = __frcp_rn(1 + exp2_approx(S[i] * e_scale));
      const float x = fmaf(-2 * x_scale, t, x_scale);
      S[i] = may_be_hidden && S[i] == -kInfinity ? S[i] : x;
    }
  }

  // S = c S - slope |i + shift - j|.
  __device__ __forceinline__ void add_alibi(int block, float c, float (&S)[kTileN / 2]) const {
    const float distance0 = static_cast<float>(row_ + work_.shift - (block * kTileN + 2 * quad_));
#pragma unroll
    for (int i = 0; i < kTileN / 2; ++i) {  // group i / 4, row i / 2 % 2, column i % 2 of the pair
      const float distance =
          distance0 + static_cast<float>(8 * (i / 2 % 2) - (8 * (i / 4) + i % 2));
      S[i] = fmaf(-slope_, fabsf(distance), S[i] * c);
    }
  }

  // ---- masks ----

  __device__ __forceinline__ uint32_t visible_data(int row, int block, int column) const {
    uint32_t visible = ~0u;
    if (a_.mask_bits) {
      const int64_t head = work_.n * a_.mask_stride_batch + work_.head * a_.mask_stride_head;
      visible = static_cast<const MaskWord*>(
          a_.mask_bits)[((head * a_.mask_rows + row) * a_.mask_blocks + block) * 4 + quad_];
    }
    if (p_.num_ranges) {
      const View& view = p_.tensor[TESSERA_KEY_RANGES];
      uint32_t in_range = 0;
      for (int i = 0; i < p_.num_ranges; ++i) {
        const int* range = static_cast<const int*>(view.data) +
                           offset_of(view, work_.q.batch, work_.head, work_.q.first + row, 2 * i);
        // Clamped, so that the difference does not overflow.
        const int lo = max(range[0], 0), hi = max(range[view.stride[3]], 0);
        in_range |= element_bits(lo - column, hi - column);
      }
      visible &= in_range;
    }
    const View& ids_q = p_.tensor[TESSERA_SEGMENT_IDS_Q];
    if (ids_q.data) {
      const View& ids_k = p_.tensor[TESSERA_SEGMENT_IDS_K];
      const int id =
          static_cast<const int*>(ids_q.data)[offset_of(ids_q, work_.q.batch, work_.q.first + row)];
      const int* id_k =
          static_cast<const int*>(ids_k.data) + offset_of(ids_k, work_.k.batch, work_.k.first);
      const int64_t stride = not_hoisted(ids_k.stride[1]);
      uint32_t same = 0;
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        const int key = column + 8 * (e / 2) + e % 2;
        if (key < work_.k.length && id_k[key * stride] == id) same |= 1u << e;
        if (e % kLoadsAtOnce == kLoadsAtOnce - 1) no_loads_across();
      }
      visible &= same;
    }
    return visible;
  }

  // Loads in flight take registers: a few at a time, where all at once would spill.
  static constexpr int kLoadsAtOnce = 4;
  // And so do the multiples of a stride, one an element, that would be kept across blocks.
  static __device__ __forceinline__ int64_t not_hoisted(int64_t stride) {
    asm volatile("" : "+l"(stride));
    return stride;
  }
  static __device__ __forceinline__ void no_loads_across() { asm volatile("" ::: "memory"); }

  const ForwardParams& a_;
  const Params& p_;
  const Work& work_;
  int row_, quad_;
  float slope_ = 0;
};

}  // namespace tessera::cuda::sm90
