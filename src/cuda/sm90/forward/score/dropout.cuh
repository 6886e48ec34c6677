// SPDX-License-Identifier: Apache-2.0
// The dropout mask of core/mask/philox.h over an accumulator fragment.
//
// One Philox call decides what a thread holds of a 16 x 16 patch: four words, each the two columns
// of one P register. Only the patch's column changes in the counter along a row, so three of the
// first six products and half of the exclusive ors belong to the row.
#pragma once

#include "core/mask/philox.h"
#include "cuda/common/element.cuh"
#include "cuda/sm90/forward/schedule.cuh"

namespace tessera::cuda::sm90 {

// Four bytes of a and b, each copied (0-7) or filled with the sign of one (8 + 0-7).
template <int kSelector>
__device__ __forceinline__ uint32_t permute(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "n"(kSelector));
  return d;
}

class DropoutRows {
 public:
  // Loads the state, once a kernel.
  __device__ __forceinline__ explicit DropoutRows(const Params& p) {
    const View& state = p.tensor[TESSERA_RNG_STATE];
    const int64_t* words = static_cast<const int64_t*>(state.data);
    const Dropout d = Dropout::make(words[0], words[state.stride[0]], p.dropout_threshold);
    counter0_ = d.counter0;
    for (int round = 0; round < 7; ++round) {
      key0_[round] = uniform_register(d.key0 + round * 0x9E3779B9u);
      key1_[round] = uniform_register(d.key1 + round * 0xBB67AE85u);
    }
    below_half_ = d.threshold & 0x8000 ? 0u : ~0u;
    threshold_ = (d.threshold & 0x7fff) * 0x10001u;
  }

  __device__ __forceinline__ DropoutRows(const Params& p, const Work& work, int row, int quad)
      : DropoutRows(p) {
    start(p, work, row, quad);
  }

  // The rows that the thread has in a tile: `row` and row + 8.
  __device__ __forceinline__ void start(const Params& p, const Work& work, int row, int quad) {
    const uint32_t head = head_index_of(p, work.n, work.head);
    const uint32_t patch_row = row / 16 * 8 + row % 8;
    quad_ = quad;
    const Product a = multiply(kFactor0, counter0_), b = multiply(kFactor1, patch_row);
    xor1_ = a.high ^ key1_[0];
    xor2_ = b.low ^ key0_[1];
    const Product c = multiply(kFactor0, b.high ^ head ^ key0_[0]);
    const Product d = multiply(kFactor1, c.high ^ a.low ^ key1_[1]);
    xor3_[0] = d.high ^ key0_[2];
    xor3_[1] = c.low ^ key1_[2];
    xor4_ = d.low ^ key0_[3];
  }

  // Bits 15 and 31 of word[w]: whether the columns of P register 2 (w % 2) + w / 2 of the patch are
  // kept. patch: of the sequence's keys / 16.
  __device__ __forceinline__ void draw(int patch, uint32_t (&word)[4]) const {
    const Product b2 = multiply(kFactor1, (4 * patch + quad_) ^ xor1_);
    const Product a3 = multiply(kFactor0, b2.high ^ xor2_);
    Product a = multiply(kFactor0, b2.low ^ xor3_[0]), b = multiply(kFactor1, a3.high ^ xor3_[1]);
    uint32_t c0 = b.high ^ xor4_, c2 = a.high ^ a3.low ^ key1_[3];
#pragma unroll
    for (int round = 4; round < 7; ++round) {
      const uint32_t c1 = b.low, c3 = a.low;
      a = multiply(kFactor0, c0), b = multiply(kFactor1, c2);
      c0 = b.high ^ c1 ^ key0_[round];
      c2 = a.high ^ c3 ^ key1_[round];
    }
    word[0] = kept(c0), word[1] = kept(b.low), word[2] = kept(c2), word[3] = kept(a.low);
  }

  // P = 0 where it is not kept. patch: of the first register.
  template <int kRegisters>
  __device__ __forceinline__ void apply(int patch, uint32_t (&P)[kRegisters]) const {
#pragma unroll
    for (int i = 0; i < kRegisters / 4; ++i) {
      uint32_t word[4];
      draw(patch + i, word);
#pragma unroll
      for (int w = 0; w < 4; ++w) P[4 * i + 2 * (w % 2) + w / 2] &= permute<0xBB99>(word[w], 0);
    }
  }

 private:
  static constexpr uint32_t kFactor0 = 0xD2511F53u, kFactor1 = 0xCD9E8D57u;
  struct Product {
    uint32_t low, high;
  };
  static __device__ __forceinline__ Product multiply(uint32_t a, uint32_t b) {
    const uint64_t product = static_cast<uint64_t>(a) * b;
    return {static_cast<uint32_t>(product), static_cast<uint32_t>(product >> 32)};
  }

  // Bits 15 and 31: field >= threshold, of two 16-bit fields at once. The lower 15 bits are
  // compared by a subtraction that cannot borrow from the other field. The top bit or they decide
  // if the threshold is below a half, else both must.
  __device__ __forceinline__ uint32_t kept(uint32_t fields) const {
    const uint32_t lower = (fields | 0x80008000u) - threshold_;
    return (lower & fields) | (below_half_ & (lower | fields));
  }

  uint32_t key0_[7], key1_[7], counter0_, threshold_, below_half_;
  uint32_t xor1_, xor2_, xor3_[2], xor4_;
  int quad_;
};

// The mask of a block in the kernel of dropout alone, drawn while the products before it run: a
// byte an element, of ones or zeros.
template <int kTileN>
class EarlyDropout {
 public:
  __device__ __forceinline__ explicit EarlyDropout(const Params& p) : rows_(p) {}

  __device__ __forceinline__ void start_tile(const Params& p, const Work& work, int row, int quad,
                                             int block) {
    rows_.start(p, work, row, quad);
#pragma unroll
    for (int i = 0; i < kTileN / 16; ++i) draw(block, i);
  }
  // Patch i of the block.
  __device__ __forceinline__ void draw(int block, int i) {
    uint32_t word[4];
    rows_.draw(block * (kTileN / 16) + i, word);
    bytes_[2 * i] = permute<0xFDB9>(word[0], word[1]);
    bytes_[2 * i + 1] = permute<0xFDB9>(word[2], word[3]);
  }
  __device__ __forceinline__ void apply(uint32_t (&P)[kTileN / 4]) const {
#pragma unroll
    for (int i = 0; i < kTileN / 16; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        P[4 * i + r] &= permute<0x1100>(bytes_[2 * i + r], 0);
        P[4 * i + 2 + r] &= permute<0x3322>(bytes_[2 * i + r], 0);
      }
    }
  }

 private:
  DropoutRows rows_;
  uint32_t bytes_[kTileN / 8];
};

}  // namespace tessera::cuda::sm90
