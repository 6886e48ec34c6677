// SPDX-License-Identifier: Apache-2.0
// What a warp does with a block of keys for few rows: S^T = K Q^T, softmax, O^T += V^T P^T. Keys and
// columns of V are the 16 rows of an mma and the rows of queries its 8 columns, so that few rows
// waste little: a warp has the columns 8 n .. 8 n + 7 of n < kGroups groups of rows, lane l rows
// 2 (l % 4) and the next of each.
#pragma once

#include "cuda/common/few/operands.cuh"

namespace tessera::cuda {

// The softmax and the O^T of a warp's rows over its keys.
template <typename S>
struct TransposedRows {
  float max[S::kGroups][2], sum[S::kGroups][2];  // in units of log2; sum: of this lane's keys
  float o[S::kD / 16][S::kGroups][4];

  __device__ TransposedRows() {
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

  // q: shared memory of the warp's rows, as S::q_lane_address has it; read with each block, or now.
  __device__ __forceinline__ void set_queries(uint32_t q) {
    const int lane = threadIdx.x % 32;
    q_lanes_ = S::q_lane_address(q, lane % 8, lane / 8);
    if constexpr (S::kKeepsQ) {
#pragma unroll
      for (int step = 0; step < S::kD / 32; ++step) load_queries(queries_[step], step);
    }
  }

  // k, v: shared memory of the warp's first key. scale: of each of the lane's rows, to units of
  // log2. visible(n, e): the keys of such a row, read where some key of the block is hidden from some
  // row. seen: keys that some row sees.
  template <typename Visible>
  __device__ __forceinline__ void add(uint32_t k, uint32_t v, const float (&scale)[S::kGroups][2],
                                      int key0, bool clean, const Interval& seen,
                                      const Visible& visible) {
    Scores s;
    score(s, k);
    softmax(s, scale, key0, clean, visible);
    add_values(s, v, key0, clean, seen);
  }

  // The lane's sums over all of the warp's keys: once, at last.
  __device__ __forceinline__ void add_lanes() {
#pragma unroll
    for (int n = 0; n < S::kGroups; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) {
          sum[n][e] += __shfl_xor_sync(~0u, sum[n][e], lanes);
        }
      }
    }
  }

  // Group n, as the warp's part: its rows stand from `row` on.
  template <typename Parts>
  __device__ __forceinline__ void store(Parts& parts, int of, int row, int n) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int at = row + lane % 4 * 2 + e;
      if (lane < 4) {
        parts.max[of][at] = max[n][e];
        parts.sum[of][at] = sum[n][e];
      }
#pragma unroll
      for (int m = 0; m < S::kD / 16; ++m) {
        float* to = &parts.o[of][at][16 * m];
        if constexpr (S::kFp8) {
          *reinterpret_cast<float2*>(to + lane / 4 * 2) = {o[m][n][e], o[m][n][e + 2]};
        } else {
          to[lane / 4] = o[m][n][e];
          to[lane / 4 + 8] = o[m][n][e + 2];
        }
      }
    }
  }

 private:
  static constexpr int kSubs = S::kKeys / 16;
  using Element = typename S::Element;
  using Scores = float[kSubs][S::kGroups][4];
  using Queries = uint32_t[S::kGroups][4];  // of 32 columns

  __device__ __forceinline__ void load_queries(Queries& b, int step) const {
#pragma unroll
    for (int n = 0; n < S::kGroups; ++n) load_matrices(b[n], S::q_at(q_lanes_, n, 4 * step));
  }

  // S^T = K Q^T
  __device__ __forceinline__ void score(Scores& s, uint32_t k) {
#pragma unroll
    for (auto& sub : s) {
      for (auto& group : sub) {
        for (float& x : group) x = 0;
      }
    }
    // Where registers allow, every other step has sums of its own: two chains of products.
    constexpr bool kTwoChains = kSubs * S::kGroups <= 2;
    Scores odd = {};
    uint32_t lanes[kSubs];
#pragma unroll
    for (int i = 0; i < kSubs; ++i) lanes[i] = k_lanes<S>(k, 16 * i);
#pragma unroll
    for (int step = 0; step < S::kD / 32; ++step) {
      Queries read;
      if constexpr (!S::kKeepsQ) load_queries(read, step);
      const Queries& b = S::kKeepsQ ? queries_[S::kKeepsQ ? step : 0] : read;
#pragma unroll
      for (int i = 0; i < kSubs; ++i) {
        uint32_t a[2][4];
        load_k<S>(a, lanes[i], step);
#pragma unroll
        for (int n = 0; n < S::kGroups; ++n) {
          multiply_16x8<Element>(s[i][n], a[0], b[n]);
          multiply_16x8<Element>(kTwoChains ? odd[i][n] : s[i][n], a[1], b[n] + 2);
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

  // P = 2^(x - m), with the sums and the O^T before brought to the new maxima, which few blocks have.
  template <typename Visible>
  __device__ __forceinline__ void softmax(Scores& s, const float (&scale)[S::kGroups][2], int key0,
                                          bool clean, const Visible& visible) {
    const int lane = threadIdx.x % 32;
    float most[S::kGroups][2];
    bool rises = false;
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
        most[n][e] = max[n][e];
#pragma unroll
        for (int i = 0; i < kSubs; ++i) {
          most[n][e] = fmaxf(most[n][e], fmaxf(s[i][n][e], s[i][n][e + 2]));
        }
        rises |= most[n][e] > max[n][e];
      }
    }
    if (__any_sync(~0u, rises)) rescale(most);
#pragma unroll
    for (int n = 0; n < S::kGroups; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float top = max[n][e] == -kInfinity ? 0 : max[n][e];
#pragma unroll
        for (int i = 0; i < kSubs; ++i) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float& x = s[i][n][e + 2 * half];
            x = exp2_approx(x - top);
            sum[n][e] += x;
          }
        }
      }
    }
  }

  __device__ __forceinline__ void rescale(float (&most)[S::kGroups][2]) {
    float factor[S::kGroups][2];
#pragma unroll
    for (int n = 0; n < S::kGroups; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) {
          most[n][e] = fmaxf(most[n][e], __shfl_xor_sync(~0u, most[n][e], lanes));
        }
        const float top = most[n][e] == -kInfinity ? 0 : most[n][e];
        factor[n][e] = exp2_approx(max[n][e] - top);
        max[n][e] = most[n][e];
        sum[n][e] *= factor[n][e];
      }
    }
#pragma unroll
    for (auto& columns : o) {
#pragma unroll
      for (int n = 0; n < S::kGroups; ++n) {
#pragma unroll
        for (int c = 0; c < 4; ++c) columns[n][c] *= factor[n][c % 2];
      }
    }
  }

  // O^T += V^T P^T
  __device__ __forceinline__ void add_values(const Scores& s, uint32_t v, int key0, bool clean,
                                             const Interval& seen) {
#pragma unroll
    for (int i = 0; i < kSubs; ++i) {
      uint32_t b[S::kGroups][2];
#pragma unroll
      for (int n = 0; n < S::kGroups; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          b[n][half] = transpose_8x8(pack<Element>(s[i][n][2 * half], s[i][n][2 * half + 1]));
        }
      }
      // A weight of 0 is no protection from what may lie there.
      uint32_t kept[2] = {~0u, ~0u};
      if (S::kKeepsHidden && !clean) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int key = key0 + 16 * i + 8 * half + threadIdx.x % 4 * 2;
          kept[half] = (seen.contains(key) ? 0xFFFFu : 0) | (seen.contains(key + 1) ? ~0xFFFFu : 0);
        }
      }
      const uint32_t lanes = v_lanes<S>(v, 16 * i);
#pragma unroll
      for (int piece = 0; piece < S::kD / 32; ++piece) {
        uint32_t a[2][4];
        load_v<S>(a, lanes, piece, kept);
#pragma unroll
        for (int n = 0; n < S::kGroups; ++n) {
          multiply_16x8<Element>(o[2 * piece][n], a[0], b[n]);
          multiply_16x8<Element>(o[2 * piece + 1][n], a[1], b[n]);
        }
      }
    }
  }

  uint32_t q_lanes_;
  Queries queries_[S::kKeepsQ ? S::kD / 32 : 1];
};

}  // namespace tessera::cuda
