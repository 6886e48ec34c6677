// SPDX-License-Identifier: Apache-2.0
// What kernels with features do to a block of scores that the lean ones do not, one function a
// feature, over the fragment of one warpgroup: bias, softcap, ALiBi, dense masks, key ranges,
// segments. Dropout is in forward/score/dropout.cuh.
//
// kSet says which features are compiled in (common/features.h); kLoadsBias: biases that TMA cannot
// read, too. A kernel of one feature runs only
// problems that have it; in others each is behind a uniform branch.
//
// A thread has two rows, r = 0 and 1, eight apart, and of each the elements e = 0, 1, ... at
// columns 8 (e / 2) + e % 2 from its first one. S[4 (e / 2) + 2 r + e % 2] is element e of row r.
#pragma once

#include <type_traits>

#include "cuda/common/element.cuh"
#include "cuda/common/features.h"
#include "cuda/common/score/score.cuh"
#include "cuda/sm90/forward/output.cuh"
#include "cuda/sm90/forward/score/bias.cuh"
#include "cuda/sm90/forward/score/blocks.cuh"
#include "cuda/sm90/machine/fragment.cuh"
#include "cuda/sm90/score/softcap.cuh"

namespace tessera::cuda::sm90 {

// What data masks say of a block, as a thread loads it.
template <int kTileN>
struct MaskData {
  using Word = std::conditional_t<kTileN == 64, uint16_t, uint32_t>;
  const Word* bits[2];                      // of a dense mask: where those of a row begin
  uint32_t words[2];                        // those of the block
  int row_ids[2], key_ids[kTileN / kWarp];  // of segments
};

template <typename Element, int kTileN, uint32_t kSet, bool kLoadsBias = false>
class Features {
 public:
  static constexpr int kElements = kTileN / 4;  // of a row that a thread holds
  using MaskData = sm90::MaskData<kTileN>;

  __device__ __forceinline__ Features(const ForwardParams& a, const Work& work, int row, int lane)
      : a_(a), p_(a.problem), work_(work), row_(row), quad_(lane % 4) {}

  // ALiBi's slope of a tile's head: for natural logits; in the kernel of ALiBi alone for raw
  // scores.
  static __device__ __forceinline__ float slope_of(const Params& p, const Work& work) {
    if (!has_alibi(p)) return 0;
    const View& slopes = p.tensor[TESSERA_ALIBI_SLOPES];
    const float slope = load_float(slopes.data, offset_of(slopes, work.n, work.head), slopes.dtype);
    return kSet == kAlibi ? slope / p.softmax_scale : slope;
  }

  // ---- which features the problem has ----

  static __device__ __forceinline__ bool has_softcap(const Params& p) {
    return kSet == kSoftcap || (kSet & kSoftcap && p.flags & TESSERA_SOFTCAP);
  }
  static __device__ __forceinline__ bool has_alibi(const Params& p) {
    return kSet == kAlibi || (kSet & kAlibi && p.tensor[TESSERA_ALIBI_SLOPES].data);
  }
  static __device__ __forceinline__ bool has_bias(const Params& p) {
    return kSet == kBias || (kSet & kBias && p.tensor[TESSERA_BIAS].data);
  }
  static __device__ __forceinline__ bool has_bias_tiles(const ForwardParams& a) {
    return kSet == kBias || (kSet & kBias && a.bias_in_tiles);
  }

  // True when shape() has something to do.
  static constexpr bool kShapes = (kSet & ~(kMasks | kDropout)) != 0 && kSet != kSoftcap;

  // True if shape() has something to do for this problem. Mixed and rich kernels ask this and
  // lists() once a block instead of once a feature.
  static __device__ __forceinline__ bool shapes(const Params& p) {
    return kShapes && (has_softcap(p) || has_alibi(p) || has_bias(p));
  }

  // True if data masks may cut blocks of this problem, or leave them out.
  static __device__ __forceinline__ bool lists(const ForwardParams& a) {
    return kSet == kMasks || (kSet & kMasks && (a.mask_states || a.problem.num_ranges ||
                                                a.problem.tensor[TESSERA_SEGMENT_IDS_Q].data));
  }

  // What scores are multiplied by before exp2, where that is all that is left to do.
  static __device__ __forceinline__ float exponent_scale(const Params& p) {
    if (kSet == kSoftcap) return 1;  // see LateSoftcap
    if (kSet == kAlibi) return log2_scale(p);
    const bool shaped =
        has_softcap(p) || has_alibi(p) || (has_bias(p) && !(p.flags & TESSERA_BIAS_PRE_SCALE));
    return shaped ? kLog2e : log2_scale(p);
  }

  // Scores to x of docs/semantics.md without the masks: natural logits, or raw scores where nothing
  // but ALiBi, or a bias before the scale, was to be done. See row_offset().
  // visible: of a block that is `masked`; what stands elsewhere may be anything, and must not
  // decide how the rest is computed.
  __device__ __forceinline__ void shape(int block, int thread, BiasStage<kTileN>& bias, bool masked,
                                        const VisibleBits<kTileN>& visible,
                                        float (&S)[kTileN / 2]) const {
    const bool biased = has_bias(p_), pre = biased && p_.flags & TESSERA_BIAS_PRE_SCALE,
               capped = has_softcap(p_);
    const auto add_bias = [&] {
      const float c = pre || capped ? 1.f : scale();
      if (!kLoadsBias || has_bias_tiles(a_)) {
        bias.template add<Element>(thread, c, S);
      } else {
        PlainBias<Element, kTileN>{p_, work_, row_, quad_}.add(block, c, S);
      }
    };
    if constexpr (!(kSet & kSoftcap)) {
      if (biased) add_bias();
    } else if (biased || capped) {
      // The cap and the bias, in either order; the code of each stands here once. Copies make ptxas
      // lose its way, and at times serialises the products (docs/kernels/sm90_features.md).
#pragma unroll 1
      for (int turn = 0; turn < 2; ++turn) {
        if ((turn == 0) != pre) {
          if (capped && masked) visible.set_others(0.f, S);
          if (capped) cap(S);
        } else if (biased) {
          add_bias();
        }
      }
    }
    if (has_alibi(p_)) {
      add_alibi(block, kSet == kAlibi || (biased && !pre) || capped ? 1.f : scale(), S);
    }
  }

  // What is to be taken from the logits of row r once they are all done.
  __device__ __forceinline__ float row_offset(int r) const {
    return has_alibi(p_) ? work_.slope * static_cast<float>(row_ + 8 * r - work_.m0) : 0.f;
  }

  // ---- masks over (query, key) ----

  // What load_masks() needs to know of a tile, in the kernel of masks alone.
  __device__ __forceinline__ void find_masks(MaskData& data) const {
    if (a_.mask_bits) data.bits[0] = bits_of_row(0), data.bits[1] = bits_of_row(1);
  }

  // What visible() needs of a block that a data mask cuts; may be asked for before its scores.
  __device__ __forceinline__ void load_masks(int block, bool partial, MaskData& data) const {
    if (!partial) return;
    if (a_.mask_bits) load_words(block, data);
    if (p_.tensor[TESSERA_SEGMENT_IDS_Q].data) load_segments(block, data);
  }

  // Loads words of a dense mask, which there must be.
  __device__ __forceinline__ void load_words(int block, MaskData& data) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      data.words[r] = (kSet == kMasks ? data.bits[r] : bits_of_row(r))[4 * block];
    }
  }
  // Hides scores of a block that hide_others() may have made NaN; leaves the words of `next`.
  __device__ __forceinline__ void hide_exactly(int block, int next, MaskData& data,
                                               float (&S)[kTileN / 2]) const {
    load_words(block, data);
    VisibleBits<kTileN> visible;
    visible.word[0][0] = data.words[0], visible.word[1][0] = data.words[1];
    visible.set_others(-kInfinity, S);
    load_words(next, data);
  }
  __device__ __forceinline__ bool has_dense_mask_alone() const {
    return a_.mask_bits && !p_.num_ranges && !p_.tensor[TESSERA_SEGMENT_IDS_Q].data;
  }

  // What is to be seen of a block that a mask cuts: the band, where `cut`, or data masks, where
  // `partial`. band: keys that it shows of the two rows. data: from load_masks().
  __device__ __forceinline__ VisibleBits<kTileN> visible(int block, bool cut,
                                                         const Interval (&band)[2], bool partial,
                                                         const MaskData& data) const {
    uint32_t shown[2] = {~0u, ~0u};
    if (partial) {
      if (a_.mask_bits) shown[0] = data.words[0], shown[1] = data.words[1];
      if (p_.num_ranges) keep_ranges(block * kTileN + 2 * quad_, shown);
      if (p_.tensor[TESSERA_SEGMENT_IDS_Q].data) {
        uint32_t same[2];
        find_same_ids(data.row_ids, data.key_ids, work_.k.length - block * kTileN, same);
        shown[0] &= same[0], shown[1] &= same[1];
      }
    }
    VisibleBits<kTileN> visible;
    if (cut) visible = VisibleBits<kTileN>(band, block, quad_);
    visible.word[0][0] = cut ? visible.word[0][0] & shown[0] : shown[0];
    visible.word[1][0] = cut ? visible.word[1][0] & shown[1] : shown[1];
    return visible;
  }

 private:
  // The scale is not 0, so that -inf stays -inf.
  __device__ __forceinline__ float scale() const { return fmaxf(p_.softmax_scale, kZeroScale); }

  // S = softcap tanh(softmax_scale S / softcap). A bias before it may have hidden some.
  __device__ __forceinline__ void cap(float (&S)[kTileN / 2]) const {
    const float inner = p_.softmax_scale / p_.softcap, outer = p_.softcap;
    float largest[2] = {};  // of a row
#pragma unroll
    for (int i = 0; i < kTileN / 2; ++i) {
      largest[i / 2 % 2] = fmaxf(largest[i / 2 % 2], fabsf(S[i]));
    }
    // What lies outside the problem has no say in how the rows beside it are computed.
    const float most =
        fmaxf(work_.exists(row_) ? largest[0] : 0.f, work_.exists(row_ + 8) ? largest[1] : 0.f);
    if (__all_sync(kAllLanes, most * inner <= CapPolynomial::kSmall)) {
      const CapPolynomial polynomial(inner, outer);
#pragma unroll
      for (int i = 0; i < kTileN / 2; ++i) S[i] = polynomial(S[i]);
      return;
    }
#pragma unroll
    for (int i = 0; i < kTileN / 2; ++i) {
      S[i] = S[i] == -kInfinity ? S[i] : cap_exactly(S[i], inner, outer);
    }
  }

  // S = c S - slope |i + shift - j|, plus row_offset(): left of the diagonal that makes
  // c S + slope (j - m0 - shift), in which the rows do not differ.
  __device__ __forceinline__ void add_alibi(int block, float c, float (&S)[kTileN / 2]) const {
    const float slope = work_.slope;
    const int column = block * kTileN + 2 * quad_ - work_.m0 - work_.band.shift;
    const bool left =
        work_.band.window.right == 0 || (block + 1) * kTileN <= work_.m0 + work_.band.shift + 1;
    if (left) {
      const float first = slope * static_cast<float>(column);
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        const float linear = fmaf(slope, static_cast<float>(8 * (e / 2) + e % 2), first);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float& s = S[4 * (e / 2) + 2 * r + e % 2];
          s = fmaf(s, c, linear);
        }
      }
      return;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float distance0 = static_cast<float>(row_ + 8 * r - work_.m0 - column);
      const float offset = row_offset(r);
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        const float distance = distance0 - static_cast<float>(8 * (e / 2) + e % 2);
        float& s = S[4 * (e / 2) + 2 * r + e % 2];
        s = fmaf(s, c, fmaf(-slope, fabsf(distance), offset));
      }
    }
  }

  // ---- masks ----

  __device__ __forceinline__ const typename MaskData::Word* bits_of_row(int r) const {
    const int64_t head = work_.n * a_.mask_stride_batch + work_.head * a_.mask_stride_head;
    const int row = min(row_ + 8 * r, a_.mask_rows - 1);
    return static_cast<const typename MaskData::Word*>(a_.mask_bits) +
           (head * a_.mask_rows + row) * a_.mask_blocks * 4 + quad_;
  }

  __device__ __forceinline__ void keep_ranges(int column, uint32_t (&visible)[2]) const {
    const View& view = p_.tensor[TESSERA_KEY_RANGES];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = row_ + 8 * r;
      if (!work_.exists(row)) continue;
      uint32_t in_range = 0;
      for (int i = 0; i < p_.num_ranges; ++i) {
        const int* range = static_cast<const int*>(view.data) +
                           offset_of(view, work_.q.batch, work_.head, work_.q.first + row, 2 * i);
        // Clamped, so that the difference does not overflow.
        const int lo = max(range[0], 0), hi = max(range[view.stride[3]], 0);
        in_range |= element_bits(lo - column, hi - column);
      }
      visible[r] &= in_range;
    }
  }

  // Lane l gets the ids of keys l, l + 32, ... of the block.
  __device__ __forceinline__ void load_segments(int block, MaskData& data) const {
    const View& ids_q = p_.tensor[TESSERA_SEGMENT_IDS_Q];
    const View& ids_k = p_.tensor[TESSERA_SEGMENT_IDS_K];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = work_.q.first + max(min(row_ + 8 * r, work_.q.length - 1), 0);
      data.row_ids[r] = static_cast<const int*>(ids_q.data)[offset_of(ids_q, work_.q.batch, row)];
    }
#pragma unroll
    for (int i = 0; i < kTileN / kWarp; ++i) {
      const int key = block * kTileN + i * kWarp + static_cast<int>(threadIdx.x % kWarp);
      data.key_ids[i] = static_cast<const int*>(ids_k.data)[offset_of(
          ids_k, work_.k.batch, work_.k.first + max(min(key, work_.k.length - 1), 0))];
    }
  }

  const ForwardParams& a_;
  const Params& p_;
  const Work& work_;
  int row_, quad_;
};

}  // namespace tessera::cuda::sm90
