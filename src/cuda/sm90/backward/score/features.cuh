// SPDX-License-Identifier: Apache-2.0
// What the rich backward kernel does to a block of scores beyond the lean one: bias, softcap,
// ALiBi, dense masks, key ranges, segments, dropout. The mirror of forward/score/features.cuh in
// the coordinates of S^T: rows are keys, columns are queries. Everything is switched by uniform
// run-time branches.
//
// A thread has two keys, r = 0 and 1, eight apart, and of each the elements e = 0, 1, ... at
// queries 8 (e / 2) + e % 2 from its first one. S[4 (e / 2) + 2 r + e % 2] is element e of key r.
//
// A step calls, in this order: look() and stage_bias() while the products run, softmax() when S is
// there, differentiate() when dP is there too. How S becomes P depends on the kernel:
//
//   softmax()            S = P. With a softcap only S = tanh or u (see cap()), from which
//                      differentiate() makes both P and the cap's slope: no second array is held
//   softmax_capped()     kernels of softcap alone: P, and S = P times the slope
//   softmax_apart()      pairs of CTAs, where another warpgroup makes dP: P, and what dS is made of
//   softmax_with_distances()  kernels of ALiBi alone: S = P
//
// All but softmax_capped() end in finish_softmax(): distances, exponentials, and zeros where
// hidden.
//
// A packed mask comes with a block, by way of shared memory: a word a thread and 64 queries.
#pragma once

#include "cuda/common/element.cuh"
#include "cuda/common/score/score.cuh"
#include "cuda/sm90/backward/edges.cuh"
#include "cuda/sm90/backward/params.h"
#include "cuda/sm90/backward/schedule/schedule.cuh"
#include "cuda/sm90/backward/tile.h"
#include "cuda/sm90/machine/fragment.cuh"
#include "cuda/sm90/machine/ptx.cuh"
#include "cuda/sm90/score/scale.cuh"
#include "cuda/sm90/score/softcap.cuh"

namespace tessera::cuda::sm90 {

// How many queries a piece of a packed mask has: one word a thread, 16 bits for each of its keys.
constexpr int kMaskPiece = 64;
constexpr int kMaskKeys = 16;  // and keys: those of a warp

// How data masks bear on a block, bits. The intervals of spans hold the band too.
enum BlockMask {
  kMaskCuts = 1,     // they hide some key of the tile from some query
  kMaskIsSpans = 2,  // each key is seen by an interval of queries, which is in shared memory
};

// kFeatures: of Feature (common/features.h); what is not among them costs nothing. kInTurn: dQ is
// summed deterministically, by code that needs registers of its own.
template <typename Element, int kTileM, uint32_t kFeatures, bool kInTurn = false>
class BackwardFeatures {
 public:
  static constexpr int kGroups = kTileM / 8, kElements = kTileM / 4;  // of a key
  static constexpr int kPieces = kTileM / kMaskPiece;
  // Each block is known while the one before is computed, and its bias is copied meanwhile. Such
  // kernels get rows of 16-bit elements that can be copied by 16 bytes.
  static constexpr bool kFetchesBias = (kFeatures & kEverything) == kBias;
  static constexpr int kPieceBytes = kMaskPiece * kMaskKeys * 2;  // of bias that a warp stages
  // The kernel of softcap alone has registers for P while dP is being made.
  static constexpr bool kKeepsP = kFeatures == kSoftcap && !kInTurn;

  // key0: the first of the 16 keys of this warp.
  __device__ __forceinline__ BackwardFeatures(const BackwardParams& a, const KeyTile& tile,
                                              int key0)
      : a_(a), p_(a.problem), tile_(tile), key0_(key0) {
    if (drops()) dropout_ = dropout_of(p_);
    if (alibi()) is_left_ = uniform_register(tile.band.window.right) == 0;
  }

  __device__ __forceinline__ void start_head(int head) {
    head_ = head;
    const View& slopes = p_.tensor[TESSERA_ALIBI_SLOPES];
    if (alibi()) {
      slope_ = kLog2e * load_float(slopes.data, offset_of(slopes, tile_.n, head), slopes.dtype);
    }
  }

  // Which keys the block's queries see, and which of their weights dropout keeps. cut: the band
  // hides some key of the tile from some query; how: of BlockMask. mask: the warp's first word of
  // the packed one, those of pieces `pitch` bytes apart; spans: of the thread's first key.
  __device__ __forceinline__ void look(int block, bool cut, int how, uint32_t mask, uint32_t pitch,
                                       uint32_t spans) {
    const bool spanned = kFeatures & kMasks && how & kMaskIsSpans;
    masked_ = spanned ? how & kMaskCuts : cut || how;
    visible_[0] = visible_[1] = ~0u;
    if (spanned ? masked_ : cut) {
      const int query = block * kTileM + 2 * quad();
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        Interval queries;
        if (spanned) {
          const float2 span = load_shared_pair(spans + 64 * r);
          queries = {__float_as_int(span.x), __float_as_int(span.y)};
        } else {
          queries = tile_.queries_of_key(key() + 8 * r);
        }
        visible_[r] = element_bits(queries.lo - query, queries.hi - query);
      }
    }
    if (kFeatures & kMasks && how == kMaskCuts) {
      if (a_.mask_bits) see_mask(mask, pitch);
      if (p_.num_ranges) see_ranges(block);
      if (p_.tensor[TESSERA_SEGMENT_IDS_Q].data) see_segments(block);
    }
    if (drops()) {
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        kept_[piece] = kept_of(block * kTileM + piece * kMaskPiece);
      }
    }
  }

  __device__ __forceinline__ bool stages_bias() const {
    if constexpr (kFetchesBias) return true;
    const View& bias = p_.tensor[TESSERA_BIAS];
    return biased() && bias.dtype != TESSERA_FP32 && bias.stride[3] == 1 && bias.vector_bytes == 16;
  }

  // Copies the 16-bit bias of the block and the warp's keys to shared memory, kPieceBytes for each
  // piece of queries, `pitch` bytes apart: [query][two units of 8 keys], units trading places every
  // four queries. Each thread takes 8 keys of every 16th query.
  __device__ __forceinline__ void stage_bias(int block, uint32_t shared, uint32_t pitch) const {
    const int unit = lane() % 2, key = key0_ + 8 * unit;
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      uint4 x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int query = block * kTileM + piece * kMaskPiece + lane() / 2 + 16 * i;
        x[i] = uint4{};
        if (query >= tile_.q.length) continue;
        const uint16_t* row = static_cast<const uint16_t*>(row_of_bias(query, 2)) + key;
        if (key + 8 <= tile_.k.length) {
          x[i] = *reinterpret_cast<const uint4*>(row);
        } else {
          uint32_t words[4] = {};
#pragma unroll
          for (int j = 0; j < 7; ++j) {
            if (key + j < tile_.k.length) {
              words[j / 2] |= static_cast<uint32_t>(row[j]) << (j % 2 * 16);
            }
          }
          x[i] = uint4{words[0], words[1], words[2], words[3]};
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int query = lane() / 2 + 16 * i;
        store_shared(shared + piece * pitch + query * 32 + ((unit ^ query / 4 % 2) << 4), x[i]);
      }
    }
    __syncwarp();
  }

  // The same as stage_bias(), a step ahead, for a head that may be the next one: softmax() waits
  // for the copies.
  __device__ __forceinline__ void fetch_bias(int head, int block, uint32_t shared,
                                             uint32_t pitch) const {
    const View& view = p_.tensor[TESSERA_BIAS];
    const int unit = lane() % 2, key = key0_ + 8 * unit, row = lane() / 2;
    const int rows = tile_.q.length - block * kTileM - row;
    const int bytes = 2 * min(max(tile_.k.length - key, 0), 8);
    const auto* from = static_cast<const uint16_t*>(view.data) +
                       offset_of(view, tile_.n, head, block * kTileM + row, key);
    const uint32_t to = shared + row * 32 + ((unit ^ row / 4 % 2) << 4);
#pragma unroll
    for (int i = 0; i < kTileM / 16; ++i) {
      copy_async(to + i / 4 * pitch + i % 4 * 512, from, 16 * i < rows ? bytes : 0);
      from += 16 * view.stride[2];
    }
  }

  // Turns S into P; with a softcap only into what differentiate() needs for P and the slope of the
  // cap. A kernel that weighs all there is gets P, and S becomes P times the slope. shared, pitch:
  // where stage_bias() has put the bias; lse2: the thread's first pair.
  __device__ __forceinline__ void softmax(int block, uint32_t shared, uint32_t pitch, uint32_t lse2,
                                          float (&S)[kTileM / 2], uint32_t (&P)[kTileM / 4]) {
    if constexpr (kKeepsP) {
      softmax_capped(lse2, S, P);
      return;
    }
    const bool before = pre_scale();
    if (biased() && before) add_bias(block, shared, pitch, 1.f, 1.f, S);
    if (capped()) {
      cap(S);
      return;
    }
    if (biased() && !before) add_bias(block, shared, pitch, log2_scale(p_), kLog2e, S);
    finish_softmax(block, biased() && !before ? 1.f : log2_scale(p_), PairsOfQueries{lse2}, S);
  }
  // S to P in a kernel that knows ALiBi alone. lse2: of the thread's queries, of(group).
  template <typename Queries>
  __device__ __forceinline__ void softmax_with_distances(int block, const Queries& lse2,
                                                         float (&S)[kTileM / 2]) const {
    finish_softmax(block, log2_scale(p_), lse2, S);
  }

  // Turns S, in a kernel whose other warpgroup makes dP, into P as dropout leaves it, and into what
  // dS is made of, which is P times the slope of the cap.
  __device__ __forceinline__ void softmax_apart(int block, uint32_t shared, uint32_t pitch,
                                                uint32_t lse2, float (&S)[kTileM / 2],
                                                uint32_t (&P)[kTileM / 4],
                                                uint32_t (&weights_of_ds)[kTileM / 4]) {
    softmax(block, shared, pitch, lse2, S, P);
    const bool slopes = !kKeepsP && capped();
    float slope[kTileM / 2];
    if (slopes) {
#pragma unroll
      for (int e = 0; e < kTileM / 2; ++e) slope[e] = slope_of_cap(S[e]);
      softmax_after_cap(block, shared, pitch, lse2, S);
#pragma unroll
      for (int e = 0; e < kTileM / 2; ++e) slope[e] *= S[e];
    }
#pragma unroll
    for (int i = 0; i < kTileM / 4; ++i) {
      const int e = 2 * i;
      weights_of_ds[i] =
          slopes ? pack<Element>(slope[e], slope[e + 1]) : pack<Element>(S[e], S[e + 1]);
      if constexpr (!kKeepsP) {
        P[i] = drops() ? pack<Element>(kept(e) ? S[e] : 0.f, kept(e + 1) ? S[e + 1] : 0.f)
                       : pack<Element>(S[e], S[e + 1]);
      }
    }
  }
  // A bit for each S[e] of a block of 64 queries that dropout keeps.
  __device__ __forceinline__ uint32_t kept_bits() const { return drops() ? kept_[0] : ~0u; }

  // S to P, if softmax() has not done it, and dP to dS; then P as dropout leaves it, without its
  // scale. delta: the thread's first pair.
  __device__ __forceinline__ void differentiate(int block, uint32_t shared, uint32_t pitch,
                                                uint32_t lse2, uint32_t delta,
                                                float (&S)[kTileM / 2], float (&dP)[kTileM / 2]) {
    if (!kKeepsP && capped()) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const float2 of_query = load_shared_pair(delta + 32 * g);
#pragma unroll
        for (int e = 4 * g; e < 4 * g + 4; ++e) {
          const float dp = !drops() || kept(e) ? dP[e] : 0.f;
          dP[e] = (dp - (e % 2 ? of_query.y : of_query.x)) * slope_of_cap(S[e]);
        }
      }
      softmax_after_cap(block, shared, pitch, lse2, S);
#pragma unroll
      for (int e = 0; e < kTileM / 2; ++e) dP[e] *= S[e];
      if (!drops()) return;
#pragma unroll
      for (int e = 0; e < kTileM / 2; ++e) S[e] = kept(e) ? S[e] : 0.f;
      return;
    }
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const float2 of_query = load_shared_pair(delta + 32 * g);
#pragma unroll
      for (int e = 4 * g; e < 4 * g + 4; ++e) {
        const float d = e % 2 ? of_query.y : of_query.x;
        if (drops()) {
          // Exactly 0 where dP is delta: what one key has is not dropped, or both are 0.
          dP[e] = S[e] * ((kept(e) ? dP[e] : 0.f) - d);
          S[e] = kept(e) ? S[e] : 0.f;
        } else {
          dP[e] = S[e] * (dP[e] - d);
        }
      }
    }
  }

 private:
  // tanh y, as cap() leaves it, to P.
  __device__ __forceinline__ void softmax_after_cap(int block, uint32_t shared, uint32_t pitch,
                                                    uint32_t lse2, float (&S)[kTileM / 2]) {
    float c = kLog2e * p_.softcap;
    if (biased() && !pre_scale()) {
      add_bias(block, shared, pitch, c, kLog2e, S);
      c = 1;
    }
    finish_softmax(block, c, PairsOfQueries{lse2}, S);
  }
  static __device__ __forceinline__ int lane() { return threadIdx.x % kWarp; }
  static __device__ __forceinline__ int quad() { return threadIdx.x % 4; }
  __device__ __forceinline__ int key() const { return key0_ + lane() / 4; }
  __device__ __forceinline__ bool biased() const {
    return kFetchesBias || ((kFeatures & kBias) && p_.tensor[TESSERA_BIAS].data);
  }
  __device__ __forceinline__ bool alibi() const {
    return (kFeatures & kAlibi) && p_.tensor[TESSERA_ALIBI_SLOPES].data;
  }
  __device__ __forceinline__ bool capped() const {
    return (kFeatures & kSoftcap) && (p_.flags & TESSERA_SOFTCAP);
  }
  __device__ __forceinline__ bool drops() const {
    return (kFeatures & kDropout) && (p_.flags & TESSERA_DROPOUT);
  }
  __device__ __forceinline__ bool pre_scale() const { return p_.flags & TESSERA_BIAS_PRE_SCALE; }
  __device__ __forceinline__ bool kept(int e) const { return kept_[e / 32] >> e % 32 & 1; }

  // ---- dropout ----

  // A bit for each S[e] of the 64 queries from `query` on that is kept. A Philox call decides two
  // queries, eight apart, of four keys: two neighbours, and those eight further on. Each thread
  // calls for the query of its key's parity; the bits of the other key are for the thread four
  // lanes away, which has called for the other query.
  __device__ __forceinline__ uint32_t kept_of(int query) const {
    const uint32_t threshold = dropout_.threshold << 16;
    const uint32_t head = head_index_of(p_, tile_.n, head_);
    const int parity = lane() / 4 % 2;
    uint32_t even = 0, odd = 0;  // of the keys' parities; bit 0 stands for the query of mine
#pragma unroll
    for (int i = 0; i < kMaskPiece / 16; ++i) {
      const Philox4 random =
          philox4x32_7(dropout_.key0, dropout_.key1, dropout_.counter0, head,
                       (query / 16 + i) * 8 + 2 * quad() + parity, key0_ / 16 * 4 + lane() / 8);
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        const uint32_t bit = 1u << (8 * i + 4 * (word / 2) + 2 * (word % 2));
        if (random.word[word] << 16 >= threshold) even |= bit;
        if (random.word[word] >= threshold) odd |= bit;
      }
    }
    const uint32_t mine = parity ? odd : even, theirs = parity ? even : odd;
    return mine << parity | __shfl_xor_sync(kAllLanes, theirs, 4) << (parity ^ 1);
  }

  // ---- what is visible ----

  __device__ __forceinline__ void see_mask(uint32_t mask, uint32_t pitch) {
    uint32_t words[kPieces];
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      words[piece] = load_shared_word(mask + piece * pitch + 4 * lane());
    }
    visible_[0] &= __byte_perm(words[0], kPieces == 2 ? words[kPieces - 1] : 0, 0x5410);
    visible_[1] &= __byte_perm(words[0], kPieces == 2 ? words[kPieces - 1] : 0, 0x7632);
  }

  // Bit e of both keys for each query: of_query(row) is loaded, a few rows at a time, and shows(it,
  // key) says whether the row sees the key.
  template <typename OfQuery, typename Shows>
  __device__ __forceinline__ void see(int block, const OfQuery& of_query, const Shows& shows) {
    const int query = block * kTileM + 2 * quad();
    uint32_t seen[2] = {};
#pragma unroll 4
    for (int e = 0; e < kElements; ++e) {
      const auto data = of_query(existing(query + 8 * (e / 2) + e % 2, tile_.q.length));
      seen[0] |= static_cast<uint32_t>(shows(data, 0)) << e;
      seen[1] |= static_cast<uint32_t>(shows(data, 1)) << e;
    }
    visible_[0] &= seen[0], visible_[1] &= seen[1];
  }

  __device__ __forceinline__ void see_ranges(int block) {
    const View& view = p_.tensor[TESSERA_KEY_RANGES];
    struct Ranges {
      Interval a, b;
    };
    see(
        block,
        [&](int row) {
          const int* at = static_cast<const int*>(view.data) +
                          offset_of(view, tile_.q.batch, head_, tile_.q.first + row);
          const int64_t step = view.stride[3];
          return Ranges{{at[0], at[step]},
                        p_.num_ranges > 1 ? Interval{at[2 * step], at[3 * step]} : Interval{0, 0}};
        },
        [&](const Ranges& ranges, int r) {
          return ranges.a.contains(key() + 8 * r) || ranges.b.contains(key() + 8 * r);
        });
  }

  __device__ __forceinline__ void see_segments(int block) {
    const View& of_queries = p_.tensor[TESSERA_SEGMENT_IDS_Q];
    const View& of_keys = p_.tensor[TESSERA_SEGMENT_IDS_K];
    int ids_k[2], ids_q[kTileM / kWarp];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = existing(key() + 8 * r, tile_.k.length);
      ids_k[r] = static_cast<const int*>(
          of_keys.data)[offset_of(of_keys, tile_.k.batch, tile_.k.first + row)];
    }
#pragma unroll
    for (int i = 0; i < kTileM / kWarp; ++i) {
      const int row = existing(block * kTileM + i * kWarp + lane(), tile_.q.length);
      ids_q[i] = static_cast<const int*>(
          of_queries.data)[offset_of(of_queries, tile_.q.batch, tile_.q.first + row)];
    }
    uint32_t same[2];
    find_same_ids(ids_k, ids_q, kTileM, same);
    visible_[0] &= same[0], visible_[1] &= same[1];
  }

  // ---- scores ----

  __device__ __forceinline__ const void* row_of_bias(int query, int bytes) const {
    const View& view = p_.tensor[TESSERA_BIAS];
    return static_cast<const char*>(view.data) + offset_of(view, tile_.n, head_, query) * bytes;
  }

  // S = c S + factor * bias. What a bias of -inf hides stays hidden under a cap, which would make
  // it finite.
  __device__ __forceinline__ void add_bias(int block, uint32_t shared, uint32_t pitch, float c,
                                           float factor, float (&S)[kTileM / 2]) {
    const bool hides = capped() && pre_scale();
    if (hides && !masked_) masked_ = true, visible_[0] = visible_[1] = ~0u;
    const auto add = [&](int e, float bias) {
      if (hides && bias == -kInfinity) {
        visible_[e / 2 % 2] &= ~(1u << (e / 4 * 2 + e % 2));
        bias = 0;
      }
      S[e] = fmaf(S[e], c, factor * bias);
    };
    if (stages_bias()) {
      if constexpr (kFetchesBias) {
        copy_async_wait();
        __syncwarp();
      }
      const int row = lane() % 8, unit = lane() / 8 % 2;  // of matrix lane / 8: group, then unit
      const uint32_t at = shared + (lane() / 16 * 8 + row) * 32 + ((unit ^ row / 4) << 4);
#pragma unroll
      for (int g = 0; g < kGroups; g += 2) {
        uint32_t x[4];
        ldmatrix_x4_transposed(x, at + g / 8 * pitch + g % 8 * 256);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          add(4 * g + 2 * i, to_float(x[i] & 0xffff));
          add(4 * g + 2 * i + 1, to_float(x[i] >> 16));
        }
      }
      __syncwarp();  // dS is written where the bias was
      return;
    }
    if constexpr (kFetchesBias) return;
    const View& view = p_.tensor[TESSERA_BIAS];
#pragma unroll
    for (int e = 0; e < kTileM / 2; ++e) {
      const int query = block * kTileM + 2 * quad() + 8 * (e / 4) + e % 2,
                k = key() + e / 2 % 2 * 8;
      float bias = 0;
      if (query < tile_.q.length && k < tile_.k.length) {
        bias = load_float(view.data, offset_of(view, tile_.n, head_, query, k), view.dtype);
      }
      add(e, bias);
      if (e % 4 == 3) asm volatile("" ::: "memory");  // loads in flight take registers
    }
  }
  static __device__ __forceinline__ float to_float(uint32_t bits) {
    if constexpr (std::is_same_v<Element, __nv_bfloat16>) return __uint_as_float(bits << 16);
    return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
  }

  // S = t = tanh of y = softmax_scale S / softcap where the warp's scores are small beside the cap,
  // as they are in most problems: a polynomial spares the exponential unit. Elsewhere S = u with
  // the sign of S, where u = 1 / (1 + exp(2 |y|)): with it tanh and its slope are right to their
  // last digits, also where tanh is all but 1.
  __device__ __forceinline__ void cap(float (&S)[kTileM / 2]) {
    const float y_scale = p_.softmax_scale / p_.softcap;
    float largest = 0;
#pragma unroll
    for (int e = 0; e < kTileM / 2; ++e) largest = fmaxf(largest, fabsf(S[e]));
    constexpr float kSmall = 0.4f;
    small_ = __all_sync(kAllLanes, largest * y_scale <= kSmall);
    if (small_) {
#pragma unroll
      for (int e = 0; e < kTileM / 2; ++e) {
        const float y = S[e] * y_scale, y2 = y * y;
        float t = fmaf(y2, 62.f / 2835, -17.f / 315);
        t = fmaf(y2, t, 2.f / 15);
        t = fmaf(y2, t, -1.f / 3);
        S[e] = fmaf(y * y2, t, y);
      }
      return;
    }
#pragma unroll
    for (int e = 0; e < kTileM / 2; ++e) {
      const float power = exp2_approx(fabsf(S[e]) * (2 * kLog2e * y_scale));
      S[e] = copysignf(reciprocal_approx(1 + power), S[e]);
    }
  }
  // S = P times the slope of the cap, and P, from raw scores; for logits in units of log2 as the
  // forward pass caps them.
  __device__ __forceinline__ void softmax_capped(uint32_t lse2, float (&S)[kTileM / 2],
                                                 uint32_t (&P)[kTileM / 4]) const {
    const float inner = p_.softmax_scale / p_.softcap, outer = p_.softcap * kLog2e;
    float largest = 0;
#pragma unroll
    for (int e = 0; e < kTileM / 2; ++e) largest = fmaxf(largest, fabsf(S[e]));
    const auto softmax = [&](const auto& logit_and_slope) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const float2 of_query = load_shared_pair(lse2 + 32 * g);
        float p[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 x = logit_and_slope(S[4 * g + i], i % 2 ? of_query.y : of_query.x);
          p[i] = exp2_approx(x.x);
          S[4 * g + i] = p[i] * x.y;
        }
        P[2 * g] = pack<Element>(p[0], p[1]), P[2 * g + 1] = pack<Element>(p[2], p[3]);
      }
    };
    if (__all_sync(kAllLanes, largest * inner <= CapPolynomial::kSmall)) {
      const CapPolynomial logit(inner, outer), tanh(1, 1);
      const float square = inner * inner;
      const float d0 = tanh.c0, d1 = 3 * tanh.c1 * square, d2 = 5 * tanh.c2 * square * square;
      softmax([&](float s, float lse) {
        const float s2 = s * s;
        return float2{logit(s, lse), fmaf(s2, fmaf(s2, d2, d1), d0)};
      });
    } else {
      // u = 1 / (1 + exp(2 |y|)): with it tanh and its slope are right to their last digits, also
      // where tanh is all but 1.
      softmax([&](float s, float lse) {
        const float u = reciprocal_approx(1 + exp2_approx(fabsf(s) * (2 * kLog2e * inner)));
        const float logit = copysignf(fmaf(-2 * outer, u, outer), s);
        return float2{logit - lse, 4 * fmaf(-u, u, u)};
      });
    }
    mask(S);
    if (!masked_) return;
#pragma unroll
    for (int i = 0; i < kTileM / 4; ++i) {
      const uint32_t shows = visible_[i % 2] >> (i / 2 * 2);
      P[i] &= (shows & 1 ? 0xffffu : 0u) | (shows & 2 ? 0xffff0000u : 0u);
    }
  }

  // Turns what cap() left into tanh; returns its slope.
  __device__ __forceinline__ float slope_of_cap(float& s) const {
    if (small_) return fmaf(-s, s, 1.f);
    const float u = fabsf(s);
    s = copysignf(fmaf(-2.f, u, 1.f), s);
    return 4 * fmaf(-u, u, u);
  }

  // S = P: exp2(c S - slope |i + shift - j| - lse2), 0 where hidden.
  template <typename Queries>
  __device__ __forceinline__ void finish_softmax(int block, float c, const Queries& lse2,
                                                 float (&S)[kTileM / 2]) const {
    if (alibi()) {
      const int first = block * kTileM + 2 * quad() + tile_.band.shift - key();
      const float distance0 = static_cast<float>(first);
      if (is_left_) {
        // What is visible lies left of the diagonal, where the distance is linear.
        const float at_first = -slope_ * distance0;
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          const float2 of_query = lse2.of(g);
          const float less[2] = {fmaf(-slope_, 8 * g, at_first - of_query.x),
                                 fmaf(-slope_, 8 * g + 1, at_first - of_query.y)};
          float* s = S + 4 * g;
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float addend = i < 2 ? less[i] : fmaf(8, slope_, less[i - 2]);
            s[i] = exp2_approx(fmaf(s[i], c, addend));
          }
        }
        mask(S);
        return;
      }
#pragma unroll
      for (int e = 0; e < kTileM / 2; ++e) {
        const float distance =
            distance0 + static_cast<float>(8 * (e / 4) + e % 2 - 8 * (e / 2 % 2));
        S[e] = fmaf(S[e], c, -slope_ * fabsf(distance));
      }
      c = 1;
    }
    exponentials<kTileM>(c, lse2, S);
    mask(S);
  }
  __device__ __forceinline__ void mask(float (&S)[kTileM / 2]) const {
    if (masked_) zero_unseen(visible_, S);
  }

  const BackwardParams& a_;
  const Params& p_;
  const KeyTile& tile_;
  int key0_, head_ = 0;
  float slope_ = 0;
  bool masked_ = false, small_ = false;
  bool is_left_ = false;  // what is visible lies left of the diagonal
  Dropout dropout_;
  uint32_t visible_[2];     // bit e of key r, where masked_
  uint32_t kept_[kPieces];  // bit of each S[e], with dropout
};

}  // namespace tessera::cuda::sm90
