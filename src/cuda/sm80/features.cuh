// SPDX-License-Identifier: Apache-2.0
// What lean kernels need for their features: which of them a problem has, tiles of the bias, and a
// dense mask by bits.
#pragma once

#include "cuda/common/score/blocks.cuh"
#include "cuda/common/score/softcap.cuh"
#include "cuda/sm80/kernels.h"
#include "cuda/sm80/machine/lean.cuh"

namespace tessera::cuda::sm80 {

// Features with which a kernel works on logits; without them it has raw scores until the
// exponential.
inline constexpr unsigned kOfLogits = kBias | kSoftcap | kAlibi;

// True if the problem has the feature: one uniform branch in a kernel of several, none in a kernel
// of one or of others.
template <unsigned kFeatures, unsigned kFeature>
__device__ __forceinline__ bool is_on(const Params& p) {
  if constexpr ((kFeatures & kFeature) == 0) return false;
  if constexpr (kFeatures == kFeature) return true;
  if constexpr (kFeature == kBias) return p.tensor[TESSERA_BIAS].data;
  if constexpr (kFeature == kSoftcap) return p.flags & TESSERA_SOFTCAP;
  if constexpr (kFeature == kAlibi) return p.tensor[TESSERA_ALIBI_SLOPES].data;
  return p.flags & TESSERA_DROPOUT;
}

// The bias over the keys from key0 on, as rows of a head's queries.
__device__ inline QueryRows bias_rows(const Params& p, const Sequence& sequence, int head,
                                      int key0) {
  const View& bias = p.tensor[TESSERA_BIAS];
  return {static_cast<const char*>(bias.data) + offset_of(bias, sequence.n, head, 0, key0) * 2,
          bias.stride[2] * 2,
          bias.stride[1] * 2,
          0,
          sequence.q.length,
          1,
          0};
}

// Copies of tiles of the bias, [queries, keys], the last keys first: each warp copies and reads the
// kRows rows that are its own, of kColumns keys.
template <typename T, int kRows, int kColumns>
class BiasCopies {
  static constexpr int kLanes = kColumns / 8, kRowsAtOnce = 32 / kLanes;
  static_assert(32 % kLanes == 0 && kRows % kRowsAtOnce == 0);

 public:
  BiasCopies() = default;
  // query0: of the warp. The first tile that next(tile, 0) copies has keys from key0 on.
  __device__ BiasCopies(const QueryRows& rows, int query0, int key0, int keys)
      : from_(rows.base + (query0 + row()) * rows.row_bytes),
        row_bytes_(rows.row_bytes),
        rows_(rows.length - query0),
        keys_(keys),
        key_(key0 + column()) {}

  // The tile so many before the one that was copied last. anywhere: in the tensor.
  __device__ __forceinline__ void next(T* tile, int tiles_back, const void* anywhere) {
    key_ -= tiles_back * kColumns;
    const int bytes = min(max(keys_ - key_, 0), 8) * 2;
    const char* from = from_ + int64_t{key_} * 2;
    T* to = tile + row() * kSmemStride<T, kColumns> + column();
#pragma unroll
    for (int i = 0; i < kRows; i += kRowsAtOnce) {
      const bool here = row() + i < rows_ && bytes > 0;
      copy_async<16>(to + i * kSmemStride<T, kColumns>, here ? from : anywhere, here ? bytes : 0);
      from += kRowsAtOnce * row_bytes_;
    }
    commit_copies();
  }

 private:
  __device__ static int row() { return threadIdx.x % 32 / kLanes; }
  __device__ static int column() { return threadIdx.x % kLanes * 8; }

  const char* from_;
  int64_t row_bytes_;
  int rows_, keys_, key_;
};

// Raw scores to logits, by the cap or by the scale; gradient: of the logits, see Softcap.
template <unsigned kFeatures, int kCount, typename... Gradient>
__device__ __forceinline__ void make_logits(const Params& p, float scale, float (&s)[kCount],
                                            Gradient&... gradient) {
  if (is_on<kFeatures, kSoftcap>(p)) {
    Softcap(p).apply(s, gradient...);
  } else {
#pragma unroll
    for (int e = 0; e < kCount; ++e) s[e] *= scale;
  }
}

// Eight logits += their bias.
template <typename T>
__device__ __forceinline__ void add_bias(float* s, const typename Mma<T>::A& pairs) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 bias = unpack<T>(pairs.r[i]);
    s[2 * i] += bias.x * kLog2e;
    s[2 * i + 1] += bias.y * kLog2e;
  }
}

// The bits of a dense mask for one query of a head: word i is of keys 32 i on.
__device__ inline const uint32_t* mask_row(const BlockMap& map, const Sequence& sequence, int head,
                                           int query) {
  return map.bits + sequence.n * map.bits_batch + head * map.bits_head +
         int64_t{existing(query, sequence.q.length)} * map.bits_row;
}

// Hides what they hide of 64 keys; rows: of the warp's queries.
template <int kRowTiles>
__device__ __forceinline__ void apply_mask_bits(float (&s)[kRowTiles][32], const uint2* rows) {
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint2 row = rows[16 * r + 8 * half + lane_major()];
      const uint32_t word[2] = {row.x >> lane_minor(), row.y >> lane_minor()};
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        float& score = s[r][4 * (i / 2) + 2 * half + i % 2];
        score = word[i / 8] & (1u << (8 * (i / 2) + i % 2) % 32) ? score : -kInfinity;
      }
    }
  }
}

// The same of keys by queries: rows are those of the fragment's queries, word is of its keys.
template <int kRowTiles, int kN>
__device__ __forceinline__ void apply_mask_bits_transposed(float (&s)[kRowTiles][kN / 2],
                                                           const uint4* rows, int word) {
  static_assert(kRowTiles <= 2);
#pragma unroll
  for (int i = 0; i < kN / 4; ++i) {
    const auto* row = reinterpret_cast<const uint32_t*>(rows + lane_minor() + 8 * (i / 2) + i % 2);
    const uint32_t bits = row[word] >> lane_major();
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& score = s[r][4 * (i / 2) + 2 * half + i % 2];
        score = bits & (1u << (16 * r + 8 * half)) ? score : -kInfinity;
      }
    }
  }
}

}  // namespace tessera::cuda::sm80
