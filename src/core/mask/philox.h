// SPDX-License-Identifier: Apache-2.0
// Philox-4x32 with 7 rounds (Salmon et al., SC'11) and the dropout mask built on it. Host, device.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define TESSERA_HOST_DEVICE __host__ __device__ __forceinline__
#else
// Always inlined: the CPU's kernels are compiled for several instruction sets, and a copy of one of
// them must never be the one that the linker keeps for all.
#define TESSERA_HOST_DEVICE inline __attribute__((always_inline))
#endif

namespace tessera {

struct Philox4 {
  uint32_t word[4];
};

TESSERA_HOST_DEVICE constexpr Philox4 philox4x32_7(uint32_t key0, uint32_t key1, uint32_t c0,
                                                   uint32_t c1, uint32_t c2, uint32_t c3) {
  for (int round = 0; round < 7; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c0;
    const uint64_t p1 = uint64_t{0xCD9E8D57u} * c2;
    const uint32_t n0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ key0;
    const uint32_t n2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ key1;
    c1 = static_cast<uint32_t>(p1);
    c3 = static_cast<uint32_t>(p0);
    c0 = n0;
    c2 = n2;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// T = floor(p * 65536 + 0.5); 0 when that leaves 1..65535, so also for NaN.
inline uint32_t dropout_threshold(double p) {
  const double steps = p * 65536.0 + 0.5;
  return steps >= 1.0 && steps < 65536.0 ? static_cast<uint32_t>(steps) : 0;
}

// What tells heads of sequences apart: the second word of the counter, first + n * stride + h
// modulo 2^32. Of a whole problem that is n * hq + h; a part of one counts as the whole does.
struct DropoutHeads {
  uint32_t first, stride;

  // words: seed and offset, and if there are four of them first and stride, each `step` apart.
  TESSERA_HOST_DEVICE static DropoutHeads of(const int64_t* words, int64_t step, int num_words,
                                             int64_t hq) {
    if (num_words != 4) return {0, static_cast<uint32_t>(hq)};
    return {static_cast<uint32_t>(words[2 * step]), static_cast<uint32_t>(words[3 * step])};
  }

  TESSERA_HOST_DEVICE uint32_t index(int64_t n, int64_t h) const {
    return first + static_cast<uint32_t>(n) * stride + static_cast<uint32_t>(h);
  }
};

// The dropout mask of docs/semantics.md, a function of (seed, offset, sequence, head, i, j) alone.
// One Philox call decides rows {r, r+8} x columns {c, c+1, c+8, c+9} of a 16x16 patch.
struct Dropout {
  uint32_t key0, key1, counter0;
  uint32_t threshold;  // T = floor(p * 65536 + 0.5), in 1..65535; kept when the 16-bit field >= T

  TESSERA_HOST_DEVICE static Dropout make(int64_t seed, int64_t offset, uint32_t threshold) {
    const uint64_t s = static_cast<uint64_t>(seed), o = static_cast<uint64_t>(offset);
    return {static_cast<uint32_t>(s),
            static_cast<uint32_t>(s >> 32) ^ static_cast<uint32_t>(o >> 32),
            static_cast<uint32_t>(o), threshold};
  }

  // head_index: of DropoutHeads.
  TESSERA_HOST_DEVICE bool keep(uint32_t head_index, int64_t i, int64_t j) const {
    const uint32_t patch_row = static_cast<uint32_t>(i / 16 * 8 + i % 8);
    const uint32_t patch_column = static_cast<uint32_t>(j / 16 * 4 + j % 8 / 2);
    const int field = 4 * (i % 16 >= 8) + 2 * (j % 16 >= 8) + static_cast<int>(j % 2);
    const Philox4 random = philox4x32_7(key0, key1, counter0, head_index, patch_row, patch_column);
    return ((random.word[field / 2] >> (field % 2 * 16)) & 0xFFFFu) >= threshold;
  }

  TESSERA_HOST_DEVICE double scale() const { return 65536.0 / (65536.0 - threshold); }
};

}  // namespace tessera
