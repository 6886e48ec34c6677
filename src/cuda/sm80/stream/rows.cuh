// SPDX-License-Identifier: Apache-2.0
// What a warp of stream/kernel.cuh does with a block of keys: S^T = K Q^T, softmax, O^T += V^T P^T.
#pragma once

#include "cuda/sm80/stream/operands.cuh"

namespace tessera::cuda::sm80 {

// Transposes an 8 x 8 matrix of 16-bit elements that lies in a warp as an accumulator does.
__device__ inline uint32_t transpose_8x8(uint32_t x) {
  uint32_t y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// The softmax and the O^T of a warp's rows over the keys of its team.
template <typename S>
struct StreamRows {
  float max[S::kGroups][2], sum[S::kGroups][2];  // in units of log2; sum: of this lane's keys
  float o[S::kD / 16][S::kGroups][4];

  __device__ StreamRows() {
#pragma unroll
    for (int n = 0; n < S::kGroups; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) max[n][e] = -kInfinity, sum[n][e] = 0;
    }
#pragma unroll
    for (auto& columns : o) {
      for (auto& group : columns) {
        for (float& x : group) x = 0;
      }
    }
  }

  // scale: of each of the lane's rows, to units of log2. visible(n, e): the keys of such a row,
  // read where some key of the block is hidden from some row.
  template <typename Visible>
  __device__ __forceinline__ void add(const typename S::Stage& stage, const typename S::Element* q,
                                      const float (&scale)[S::kGroups][2], int key0, bool clean,
                                      const Visible& visible) {
    Scores s;
    score(s, stage, q);
    softmax(s, scale, key0, clean, visible);
    add_values(s, stage);
  }

  // As a team's part, rows from `row` on.
  template <typename Parts>
  __device__ __forceinline__ void store(Parts& parts, int team, int row) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < S::kGroups; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int at = row + 8 * n + lane % 4 * 2 + e;
        float total = sum[n][e];
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) total += __shfl_xor_sync(~0u, total, lanes);
        if (lane < 4) {
          parts.max[team][at] = max[n][e];
          parts.sum[team][at] = total;
        }
#pragma unroll
        for (int m = 0; m < S::kD / 16; ++m) {
          float* to = &parts.o[team][at][16 * m];
          if constexpr (S::kFp8) {
            *reinterpret_cast<float2*>(to + lane / 4 * 2) = {o[m][n][e], o[m][n][e + 2]};
          } else {
            to[lane / 4] = o[m][n][e];
            to[lane / 4 + 8] = o[m][n][e + 2];
          }
        }
      }
    }
  }

 private:
  static constexpr int kSubs = S::kKeys / 16;
  using M = Mma<typename S::Element>;
  using Scores = float[kSubs][S::kGroups][4];

  // S^T = K Q^T
  __device__ __forceinline__ void score(Scores& s, const typename S::Stage& stage,
                                        const typename S::Element* q) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kSubs; ++i) {
#pragma unroll
      for (int n = 0; n < S::kGroups; ++n) {
#pragma unroll
        for (float& x : s[i][n]) x = 0;
      }
    }
    // Where registers allow, every other step has sums of its own: two chains of products.
    constexpr bool kTwoChains = kSubs * S::kGroups <= 2;
    Scores odd = {};
#pragma unroll
    for (int step = 0; step < S::kD / 32; ++step) {
      uint32_t b[S::kGroups][4];
#pragma unroll
      for (int n = 0; n < S::kGroups; ++n) {
        ldmatrix_x4(b[n],
                    smem_address(q + (8 * n + lane % 8) * S::kQStride + 32 * step + lane / 8 * 8));
      }
#pragma unroll
      for (int i = 0; i < kSubs; ++i) {
        uint32_t a[2][4];
        load_k<S>(a, stage.k, 16 * i, step);
#pragma unroll
        for (int n = 0; n < S::kGroups; ++n) {
          M::multiply_n8(s[i][n], a[0], b[n]);
          M::multiply_n8(kTwoChains ? odd[i][n] : s[i][n], a[1], b[n] + 2);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kSubs; ++i) {
#pragma unroll
      for (int n = 0; n < S::kGroups; ++n) {
#pragma unroll
        for (int c = 0; kTwoChains && c < 4; ++c) s[i][n][c] += odd[i][n][c];
      }
    }
  }

  // P = 2^(x - m), with the sums and the O^T before brought to the new maxima.
  template <typename Visible>
  __device__ __forceinline__ void softmax(Scores& s, const float (&scale)[S::kGroups][2], int key0,
                                          bool clean, const Visible& visible) {
    const int lane = threadIdx.x % 32;
    float rescale[S::kGroups][2];
    bool rescales = false;
#pragma unroll
    for (int n = 0; n < S::kGroups; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
#pragma unroll
        for (int i = 0; i < kSubs; ++i) {
          s[i][n][e] *= scale[n][e];
          s[i][n][e + 2] *= scale[n][e];
        }
        if (!clean) {
          const Interval keys = visible(n, e);
#pragma unroll
          for (int i = 0; i < kSubs; ++i) {
            const int key = key0 + 16 * i + lane / 4;
            if (!keys.contains(key)) s[i][n][e] = -kInfinity;
            if (!keys.contains(key + 8)) s[i][n][e + 2] = -kInfinity;
          }
        }
        float most = max[n][e];
#pragma unroll
        for (int i = 0; i < kSubs; ++i) most = fmaxf(most, fmaxf(s[i][n][e], s[i][n][e + 2]));
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) {
          most = fmaxf(most, __shfl_xor_sync(~0u, most, lanes));
        }
        const float top = most == -kInfinity ? 0 : most;
        rescale[n][e] = exp2_approx(max[n][e] - top);
        rescales |= rescale[n][e] != 1;
        max[n][e] = most;
        float added = 0;
#pragma unroll
        for (int i = 0; i < kSubs; ++i) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float& x = s[i][n][e + 2 * half];
            x = exp2_approx(x - top);
            added += x;
          }
        }
        sum[n][e] = sum[n][e] * rescale[n][e] + added;
      }
    }
    if (__any_sync(~0u, rescales)) {
#pragma unroll
      for (auto& columns : o) {
#pragma unroll
        for (int n = 0; n < S::kGroups; ++n) {
#pragma unroll
          for (int c = 0; c < 4; ++c) columns[n][c] *= rescale[n][c % 2];
        }
      }
    }
  }

  // O^T += V^T P^T
  __device__ __forceinline__ void add_values(const Scores& s, const typename S::Stage& stage) {
#pragma unroll
    for (int i = 0; i < kSubs; ++i) {
      uint32_t b[S::kGroups][2];
#pragma unroll
      for (int n = 0; n < S::kGroups; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          b[n][half] =
              transpose_8x8(pack<typename S::Element>(s[i][n][2 * half], s[i][n][2 * half + 1]));
        }
      }
#pragma unroll
      for (int piece = 0; piece < S::kD / 32; ++piece) {
        uint32_t a[2][4];
        load_v<S>(a, stage.v, 16 * i, piece);
#pragma unroll
        for (int n = 0; n < S::kGroups; ++n) {
          M::multiply_n8(o[2 * piece][n], a[0], b[n]);
          M::multiply_n8(o[2 * piece + 1][n], a[1], b[n]);
        }
      }
    }
  }
};

}  // namespace tessera::cuda::sm80
