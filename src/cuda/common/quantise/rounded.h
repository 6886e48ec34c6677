// SPDX-License-Identifier: Apache-2.0
// What precision="fp8" multiplies (core/quantise), as kernels find it in the workspace. No CUDA
// header.
#pragma once

#include <cstdint>

#include "core/count.h"
#include "core/mask/philox.h"  // TESSERA_HOST_DEVICE

namespace tessera::cuda {

// Keys that share a scale. Those of a packed sequence are counted from its own start; it has slots
// of its own for them.
constexpr int kKeysOfScale = 128;
TESSERA_HOST_DEVICE int first_key_slot(bool packed, int extent, int first, int n) {
  return packed ? first / kKeysOfScale + n : n * ((extent + kKeysOfScale - 1) / kKeysOfScale);
}
inline Count num_key_slots(bool packed, int64_t extent, int64_t batch) {
  return packed ? Count{extent}.pieces(kKeysOfScale) + batch
                : Count{extent}.pieces(kKeysOfScale) * batch;
}

// Values are stored * scale, where stored is E4M3 and scales are powers of two. Arrays are dense,
// in the order of their axes; a packed side [t, h, d] is one of b = 1, and so are its rows' scales.
// Rows of E4M3 are padded to multiples of 16 bytes, with zeros. Rows beyond a sequence's length are
// not written.
struct Rounded {
  uint8_t *q, *grad_o;        // [b, sq, hq, dqk], [b, sq, hq, dv]; grad_o: backward alone
  uint8_t *k, *v;             // [b, sk, hk, dqk], [b, sk, hk, dv]
  float *q_scale, *do_scale;  // [b, hq, sq]
  float *k_scale, *v_scale;   // [hk, key slots]: of block j of a sequence first_key_slot() + j
  float* row;                 // [b, hq, sq]: <q, kbar> of the caller's q; null without a mean
  float* mean;                // [batch, hk, dqk]: kbar; null without a mean
  float* sums;                // [hk, key slots, dqk]: of the blocks of k, for the mean
  int key_slots;
};

// v with keys as its columns, [b, hk, dv, keys] bytes, a packed side as one of b = 1: what a kernel
// wants whose products have the keys as their sum. A sequence's keys begin at kKeysOfScale *
// first_key_slot() where they are packed. Within each 16 keys the order is 0 1 8 9 2 3 10 11 4 5 12
// 13 6 7 14 15, and behind a sequence's end there are zeros up to its last block.
struct ValuesByColumns {
  uint8_t* data;
  int64_t stride_head, stride_batch;
  int keys;  // the extent, a multiple of 16
};
constexpr int kMostColumnsOfValues = 128;

}  // namespace tessera::cuda
