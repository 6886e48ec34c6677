// SPDX-License-Identifier: Apache-2.0
// All kernels are bound by memory, and give the bits of core/quantise: what decides a rounding is
// exact, or has its order.
//
//   add_keys     the sums of each block of keys, key by key          [hk, key slots, dqk]
//   take_means   kbar, block by block                                [batch, hk, dqk]
//   round_keys   k and v: a CTA has a block of keys in registers
//   round_rows   q and do
//
// Some lanes share a row, of which each has 16 columns side by side: four stages of the butterfly
// are its own, and shuffles are dear. Whatever a thread reads is on its way before it is used.
#include <algorithm>
#include <bit>
#include <type_traits>

#include "core/mask/philox.h"
#include "cuda/common/element.cuh"
#include "cuda/common/quantise/quantise.h"
#include "cuda/common/sequence.cuh"

namespace tessera::cuda {
namespace {

constexpr int kWarp = 32;
constexpr uint32_t kAll = ~0u;
constexpr int kRowsOfQueries = 64;  // of a CTA
constexpr int kThreadsOfSum = 64, kColumnsOfSum = 2 * kThreadsOfSum;
constexpr int kBatch = 16;  // loads on their way to one sum
constexpr int kMostColumns = 1024;
constexpr int64_t kMostGridY = 65535;

struct Quantise {
  Params p;
  Rounded to;
  View from;       // k or v; q or do
  uint8_t* bytes;  // its E4M3, with `pitch` columns a row
  float* scale;
  int heads, columns, pitch;
  ValuesByColumns values;  // in place of bytes
  int turned;              // columns that the rotation turns together; 1: none
  float factor;            // of the rotation, a power of two
  uint32_t signs[kMostColumns / 32];
  bool smooths;  // less the mean (k), or with its product with it (q)
};

// How a CTA holds kRows rows: each by kLanes lanes, with kPer columns a lane.
template <int kLanesOfRow, int kColumnsOfLane, int kRowsOfCta, int kMostWarps>
struct Block {
  static constexpr int kLanes = kLanesOfRow, kPer = kColumnsOfLane, kRows = kRowsOfCta;
  static constexpr int kRowsOfWarp = kWarp / kLanes;  // at once
  static constexpr int kWarps = kRows / kRowsOfWarp < kMostWarps ? kRows / kRowsOfWarp : kMostWarps;
  static constexpr int kThreads = kWarps * kWarp, kSteps = kRows / (kRowsOfWarp * kWarps);
  // CTAs of a multiprocessor, while registers last.
  static constexpr int kCtas = kPer * kSteps <= 32 ? 3 : kThreads <= 256 ? 2 : 1;
  static_assert(kSteps * kRowsOfWarp * kWarps == kRows);

  static __device__ int row(int step) {
    return (step * kWarps + threadIdx.x / kWarp) * kRowsOfWarp + threadIdx.x % kWarp / kLanes;
  }
  static __device__ int first_column() { return threadIdx.x % kLanes * kPer; }
  template <typename Combine>
  static __device__ float over_row(float x, const Combine& combine) {
#pragma unroll
    for (int lanes = 1; lanes < kLanes; lanes *= 2) {
      x = combine(x, __shfl_xor_sync(kAll, x, lanes));
    }
    return x;
  }
};

// ---- the columns of a lane ----

// As they lie in memory, 16-bit in pairs; 0 behind the row's end.
template <typename Raw, int kPer>
struct RawColumns {
  static constexpr int kBytes = kPer * static_cast<int>(sizeof(Raw));
  uint32_t words[kBytes / 4] = {};

  __device__ void load(const Quantise& a, int64_t at, int first) {
    const Raw* const source = static_cast<const Raw*>(a.from.data) + at + first;
    if (a.from.vector_bytes == 16 && first + kPer <= a.columns) {
#pragma unroll
      for (int i = 0; i < kBytes / 16; ++i) {
        const uint4 four = reinterpret_cast<const uint4*>(source)[i];
        words[4 * i] = four.x, words[4 * i + 1] = four.y;
        words[4 * i + 2] = four.z, words[4 * i + 3] = four.w;
      }
      return;
    }
#pragma unroll
    for (int e = 0; e < kPer; ++e) {
      if (first + e >= a.columns) continue;
      if constexpr (sizeof(Raw) == 4) {
        words[e] = source[e];
      } else {
        words[e / 2] |= static_cast<uint32_t>(source[e]) << e % 2 * 16;
      }
    }
  }
  __device__ void unpack_to(float (&x)[kPer], int dtype) const {
#pragma unroll
    for (int i = 0; i < kBytes / 4; ++i) {
      if constexpr (sizeof(Raw) == 4) {
        x[i] = __uint_as_float(words[i]);
      } else {
        const float2 pair =
            dtype == TESSERA_BF16 ? unpack<__nv_bfloat16>(words[i]) : unpack<__half>(words[i]);
        x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
      }
    }
  }
};

// The largest of those that are finite.
template <int kPer>
__device__ float largest(const float (&x)[kPer]) {
  float most = 0;
#pragma unroll
  for (int e = 0; e < kPer; ++e) most = fmaxf(most, fabsf(x[e]));  // NaN is left out
  if (most < kInfinity) return most;
  most = 0;
#pragma unroll
  for (int e = 0; e < kPer; ++e) most = fmaxf(most, fabsf(x[e]) < kInfinity ? fabsf(x[e]) : 0.f);
  return most;
}

template <int kPer>
__device__ void to_bytes(const float (&x)[kPer], float inverse, uint32_t (&bytes)[kPer / 4]) {
  const auto pair = [&](int e) -> uint32_t {
    return __nv_cvt_float2_to_fp8x2({x[e] * inverse, x[e + 1] * inverse}, __NV_SATFINITE,
                                    __NV_E4M3);
  };
#pragma unroll
  for (int i = 0; i < kPer / 4; ++i) bytes[i] = pair(4 * i) | pair(4 * i + 2) << 16;
}

// `row` and pitch are multiples of 16 bytes.
template <int kPer>
__device__ void store(uint8_t* row, int first, int pitch, const uint32_t (&bytes)[kPer / 4]) {
#pragma unroll
  for (int i = 0; i < kPer / 16; ++i) {
    if (first + 16 * i >= pitch) break;
    *reinterpret_cast<uint4*>(row + first + 16 * i) = {bytes[4 * i], bytes[4 * i + 1],
                                                       bytes[4 * i + 2], bytes[4 * i + 3]};
  }
}

// The smallest power of two beside which `largest` does not saturate: as scale_for() of
// core/quantise.
__device__ float scale_for(float largest) {
  if (largest < 0x1p-110f) return 1;
  const uint32_t bits = __float_as_uint(largest);
  const int exponent = static_cast<int>(bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000);
  return __uint_as_float(static_cast<uint32_t>(exponent) << 23);
}
// 1 / scale, exactly: scale is a power of two.
__device__ float inverse_of(float scale) {
  return __uint_as_float((254u << 23) - __float_as_uint(scale));
}

// H D of a.turned columns at a time, in the lane's columns of one row after the other.
template <typename B>
class Turn {
 public:
  __device__ explicit Turn(const Quantise& a) : turned_(a.turned) {
    const int first = B::first_column();
#pragma unroll
    for (int e = 0; e < B::kPer; ++e) {
      const uint32_t negative = a.signs[(first + e) / 32] >> ((first + e) % 32) & 1;
      factors_[e] = negative ? -a.factor : a.factor;
    }
#pragma unroll
    for (int stage = 0, lanes = 1; lanes < B::kLanes; lanes *= 2, ++stage) {
      sides_[stage] = threadIdx.x & lanes ? -1.f : 1.f;
    }
  }
  __device__ void operator()(float (&x)[B::kPer]) const {
    if (turned_ <= 1) return;
#pragma unroll
    for (int e = 0; e < B::kPer; ++e) x[e] *= factors_[e];
#pragma unroll
    for (int half = 1; half < B::kPer; half *= 2) {
      if (half >= turned_) return;
#pragma unroll
      for (int e = 0; e < B::kPer; ++e) {
        if (e & half) continue;
        const float low = x[e], high = x[e + half];
        x[e] = low + high, x[e + half] = low - high;
      }
    }
#pragma unroll
    for (int stage = 0, lanes = 1; lanes < B::kLanes; lanes *= 2, ++stage) {
      if (lanes * B::kPer >= turned_) return;
#pragma unroll
      for (int e = 0; e < B::kPer; ++e) {  // a sum or a difference, rounded once
        x[e] = fmaf(x[e], sides_[stage], __shfl_xor_sync(kAll, x[e], lanes));
      }
    }
  }

 private:
  int turned_;
  float factors_[B::kPer];
  float sides_[5];
};

// ---- the mean of the keys ----

// The keys of a block that some query may see.
__device__ Interval seen_of_block(const Sequence& s, int begin) {
  const Interval seen = s.band.keys();
  return {max(begin, seen.lo), min(begin + kKeysOfScale, seen.hi)};
}
__device__ int64_t slot_of_block(const Quantise& a, const Rows& keys, int n, int head, int begin) {
  const int slot = first_key_slot(a.p.thd_k, a.p.sk, keys.first, n) + begin / kKeysOfScale;
  return int64_t{head} * a.to.key_slots + slot;
}

__device__ float finite(float x) { return fabsf(x) < kInfinity ? x : 0.f; }

// A thread has two columns of a block of keys.
__global__ void __launch_bounds__(kThreadsOfSum) add_keys(const __grid_constant__ Quantise a) {
  const TileOfRows tile = tile_of_slot<SideOfKeys>(a.p, blockIdx.x, kKeysOfScale);
  const Sequence s = sequence_of(a.p, tile.n);
  const int column = blockIdx.z * kColumnsOfSum + 2 * threadIdx.x;
  if (tile.begin < 0 || tile.begin >= s.k.length || column >= a.columns) return;
  const Interval keys = seen_of_block(s, tile.begin);
  const bool is_pair = column + 1 < a.columns, by_words = is_pair && a.from.vector_bytes >= 4;
  for (int head = blockIdx.y; head < a.heads; head += gridDim.y) {
    const uint16_t* const from = static_cast<const uint16_t*>(a.from.data) +
                                 offset_of(a.from, s.k.batch, s.k.first, head) + column;
    float2 sum = {0, 0};
    for (int j = keys.lo; j < keys.hi; j += kBatch) {
      uint32_t words[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        words[i] = 0;
        if (j + i >= keys.hi) continue;
        const uint16_t* const key = from + (j + i) * a.from.stride[1];
        if (by_words) {
          words[i] = *reinterpret_cast<const uint32_t*>(key);
        } else {
          words[i] = key[0] | (is_pair ? static_cast<uint32_t>(key[1]) << 16 : 0);
        }
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const float2 x = a.from.dtype == TESSERA_BF16 ? unpack<__nv_bfloat16>(words[i])
                                                      : unpack<__half>(words[i]);
        sum.x += finite(x.x), sum.y += finite(x.y);
      }
    }
    float* const to =
        a.to.sums + slot_of_block(a, s.k, tile.n, head, tile.begin) * a.columns + column;
    to[0] = sum.x;
    if (is_pair) to[1] = sum.y;
  }
}

__global__ void __launch_bounds__(kThreadsOfSum) take_means(const __grid_constant__ Quantise a) {
  const int n = blockIdx.x, column = blockIdx.z * kThreadsOfSum + threadIdx.x;
  if (column >= a.columns) return;
  const Sequence s = sequence_of(a.p, n);
  const Interval seen = s.band.keys();
  const int count = seen.hi - seen.lo, blocks = (s.k.length + kKeysOfScale - 1) / kKeysOfScale;
  for (int head = blockIdx.y; head < a.heads; head += gridDim.y) {
    const float* const sums = a.to.sums + slot_of_block(a, s.k, n, head, 0) * a.columns + column;
    float sum = 0;
    for (int block = 0; count > 0 && block < blocks; block += kBatch) {
      float x[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        x[i] = block + i < blocks ? sums[int64_t{block + i} * a.columns] : 0.f;
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) sum += finite(x[i]);
    }
    a.to.mean[(int64_t{n} * a.heads + head) * a.columns + column] =
        count > 0 ? __fdiv_rn(sum, static_cast<float>(count)) : 0.f;
  }
}

// ---- rounding ----

template <typename B>
__device__ void load_mean(const Quantise& a, int n, int head, int heads, float (&mean)[B::kPer]) {
  const int first = B::first_column();
  const float* const from = a.to.mean + (int64_t{n} * heads + head) * a.columns + first;
#pragma unroll
  for (int e = 0; e < B::kPer; ++e) {
    mean[e] = a.smooths && first + e < a.columns ? from[e] : 0.f;
  }
}

// The bytes of a block, [keys, columns], turned over on their way to ValuesByColumns. Groups of 16
// columns trade places from one group of 16 keys to the next, so that the lanes of a warp, which
// read the same columns of several, meet different banks.
template <int kPitch>
class Turned {
 public:
  __device__ void stage(int row, int first, const uint32_t (&bytes)[4]) {
    *reinterpret_cast<uint4*>(rows_[row] + 16 * place(row, first / 16)) = {bytes[0], bytes[1],
                                                                           bytes[2], bytes[3]};
  }
  // The first `keys` of the block, a multiple of 16. A thread has four columns of 16 keys.
  template <int kThreads>
  __device__ void store(const ValuesByColumns& to, uint8_t* first, int columns, int keys) const {
    constexpr int kGroups = kKeysOfScale / 16;
    for (int i = threadIdx.x; i < kGroups * kPitch / 4; i += kThreads) {
      const int group = i / 4 % kGroups, column = i / (4 * kGroups) * 16 + i % 4 * 4;
      if (16 * group >= keys || column >= columns) continue;
      uint32_t out[4][4];  // [column][word]
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        uint32_t x[4];  // keys 2 w, 2 w + 1 and those 8 behind them
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const int row = 16 * group + 2 * word + k % 2 + k / 2 * 8;
          x[k] = *reinterpret_cast<const uint32_t*>(rows_[row] + 16 * place(row, column / 16) +
                                                    column % 16);
        }
        const uint32_t low0 = __byte_perm(x[0], x[1], 0x5140);
        const uint32_t low2 = __byte_perm(x[0], x[1], 0x7362);
        const uint32_t high0 = __byte_perm(x[2], x[3], 0x5140);
        const uint32_t high2 = __byte_perm(x[2], x[3], 0x7362);
        out[0][word] = __byte_perm(low0, high0, 0x5410);
        out[1][word] = __byte_perm(low0, high0, 0x7632);
        out[2][word] = __byte_perm(low2, high2, 0x5410);
        out[3][word] = __byte_perm(low2, high2, 0x7632);
      }
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (column + c >= columns) break;
        *reinterpret_cast<uint4*>(first + int64_t{column + c} * to.keys + 16 * group) = {
            out[c][0], out[c][1], out[c][2], out[c][3]};
      }
    }
  }

 private:
  static __device__ int place(int row, int chunk) { return chunk ^ row / 16 % (kPitch / 16); }

  alignas(16) uint8_t rows_[kKeysOfScale][kPitch];
};
struct NotTurned {};

template <typename B, bool kByColumns>
__global__ void __launch_bounds__(B::kThreads, B::kCtas)
    round_keys(const __grid_constant__ Quantise a) {
  __shared__ float of_warps[B::kWarps];
  [[maybe_unused]] __shared__ std::conditional_t<kByColumns, Turned<B::kLanes * B::kPer>, NotTurned>
      turned;
  const TileOfRows tile = tile_of_slot<SideOfKeys>(a.p, blockIdx.x, kKeysOfScale);
  const Sequence s = sequence_of(a.p, tile.n);
  if (tile.begin < 0 || tile.begin >= s.k.length) return;
  const Interval keys = seen_of_block(s, tile.begin);
  const int first = B::first_column();
  const Turn<B> turn(a);
  const auto is_seen = [&](int step) {
    const int key = tile.begin + B::row(step);
    return key >= keys.lo && key < keys.hi;
  };
  for (int head = blockIdx.y; head < a.heads; head += gridDim.y) {
    RawColumns<uint16_t, B::kPer> raw[B::kSteps];
#pragma unroll
    for (int i = 0; i < B::kSteps; ++i) {
      const int key = tile.begin + B::row(i);
      if (is_seen(i)) raw[i].load(a, offset_of(a.from, s.k.batch, s.k.first + key, head), first);
    }
    float mean[B::kPer], x[B::kSteps][B::kPer], most = 0;
    load_mean<B>(a, tile.n, head, a.heads, mean);
#pragma unroll
    for (int i = 0; i < B::kSteps; ++i) {
      raw[i].unpack_to(x[i], a.from.dtype);
#pragma unroll
      for (int e = 0; e < B::kPer; ++e) x[i][e] -= mean[e];
      turn(x[i]);
      if (!is_seen(i)) {
#pragma unroll
        for (int e = 0; e < B::kPer; ++e) x[i][e] = 0;
      }
      most = fmaxf(most, largest(x[i]));
    }
#pragma unroll
    for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
      most = fmaxf(most, __shfl_xor_sync(kAll, most, lanes));
    }
    if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = most;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < B::kWarps; ++w) most = fmaxf(most, of_warps[w]);
    const float scale = scale_for(most), inverse = inverse_of(scale);
    if (threadIdx.x == 0) a.scale[slot_of_block(a, s.k, tile.n, head, tile.begin)] = scale;
#pragma unroll
    for (int i = 0; i < B::kSteps; ++i) {
      uint32_t bytes[B::kPer / 4];
      to_bytes(x[i], inverse, bytes);
      const int key = tile.begin + B::row(i);
      if constexpr (kByColumns) {
        turned.stage(B::row(i), first, bytes);
      } else if (key < s.k.length) {
        const int64_t row = (int64_t{s.k.batch} * a.p.sk + s.k.first + key) * a.heads + head;
        store<B::kPer>(a.bytes + row * a.pitch, first, a.pitch, bytes);
      }
    }
    __syncthreads();  // also: of_warps has been read
    if constexpr (kByColumns) {
      const int slot = first_key_slot(a.p.thd_k, a.p.sk, s.k.first, tile.n);
      const int at = tile.begin + (a.p.thd_k ? kKeysOfScale * slot : 0);
      uint8_t* const to =
          a.values.data + s.k.batch * a.values.stride_batch + head * a.values.stride_head + at;
      turned.template store<B::kThreads>(a.values, to, a.columns, a.values.keys - at);
      __syncthreads();
    }
  }
}

template <typename B, typename Raw>
__global__ void __launch_bounds__(B::kThreads, B::kCtas)
    round_rows(const __grid_constant__ Quantise a) {
  const TileOfRows tile = tile_of_slot<SideOfQueries>(a.p, blockIdx.x, B::kRows);
  const Rows rows = rows_of<SideOfQueries>(a.p, tile.n);
  if (tile.begin >= rows.length) return;
  const int first = B::first_column();
  const Turn<B> turn(a);
  const auto exists = [&](int row) { return row >= 0 && row < rows.length; };
  for (int head = blockIdx.y; head < a.heads; head += gridDim.y) {
    RawColumns<Raw, B::kPer> raw[B::kSteps];
#pragma unroll
    for (int i = 0; i < B::kSteps; ++i) {
      const int row = tile.begin + B::row(i);
      if (exists(row)) {
        raw[i].load(a, offset_of(a.from, rows.batch, rows.first + row, head), first);
      }
    }
    float mean[B::kPer];
    load_mean<B>(a, tile.n, head / a.p.group, a.p.hk, mean);
#pragma unroll
    for (int i = 0; i < B::kSteps; ++i) {
      const int row = tile.begin + B::row(i);
      float x[B::kPer], of_mean = 0;
      raw[i].unpack_to(x, a.from.dtype);
#pragma unroll
      for (int e = 0; e < B::kPer; ++e) of_mean = fmaf(x[e], mean[e], of_mean);
      turn(x);
      const float most = B::over_row(largest(x), [](float p, float q) { return fmaxf(p, q); });
      if (a.smooths) of_mean = B::over_row(of_mean, [](float p, float q) { return p + q; });
      if (!exists(row)) continue;
      const float scale = scale_for(most);
      const int64_t at = int64_t{rows.batch} * a.p.sq + rows.first + row;
      uint32_t bytes[B::kPer / 4];
      to_bytes(x, inverse_of(scale), bytes);
      store<B::kPer>(a.bytes + (at * a.heads + head) * a.pitch, first, a.pitch, bytes);
      if (first == 0) {
        const int64_t to = (int64_t{rows.batch} * a.heads + head) * a.p.sq + rows.first + row;
        a.scale[to] = scale;
        if (a.smooths) a.to.row[to] = of_mean;
      }
    }
  }
}

// ---- the host side ----

// Calls body(the Block that rows of so many columns want).
template <int kRows, int kMostWarps, int kMostWarpsOfWide, typename Body>
Status by_columns(int columns, Body&& body) {
  switch (std::bit_ceil(static_cast<unsigned>(std::max((columns + 15) / 16, 1)))) {
    case 1:
      return body(Block<1, 16, kRows, kMostWarps>{});
    case 2:
      return body(Block<2, 16, kRows, kMostWarps>{});
    case 4:
      return body(Block<4, 16, kRows, kMostWarps>{});
    case 8:
      return body(Block<8, 16, kRows, kMostWarps>{});
    case 16:
      return body(Block<16, 16, kRows, kMostWarpsOfWide>{});
    case 32:
      return body(Block<32, 16, kRows, kMostWarpsOfWide>{});
  }
  return body(Block<32, 32, kRows, kMostWarpsOfWide>{});
}

unsigned grid_y(int heads) { return static_cast<unsigned>(std::min<int64_t>(heads, kMostGridY)); }

Quantise of_tensor(const Problem& problem, const Params& p, const Rounded& to, int index) {
  const Tensor& t = problem.tensor[index];
  Quantise a{};
  a.p = p;
  a.to = to;
  a.from = p.tensor[index];
  a.heads = static_cast<int>(t.extent[2]);
  a.columns = static_cast<int>(t.extent[3]);
  a.pitch = static_cast<int>(rounded_like(t).stride[2]);
  const bool scores = index == TESSERA_Q || index == TESSERA_K;
  a.turned = scores && has(problem, TESSERA_SMOOTH_HADAMARD) ? a.columns & -a.columns : 1;
  a.smooths = scores && has(problem, TESSERA_SMOOTH_MEAN);
  a.factor = index == TESSERA_K ? 1.f / static_cast<float>(a.turned) : 1.f;
  for (int column = 0; a.turned > 1 && column < a.columns; ++column) {
    const Philox4 random = philox4x32_7(0, 0, static_cast<uint32_t>(column), 0, 0, 0);
    a.signs[column / 32] |= (random.word[0] & 1) << column % 32;
  }
  return a;
}

Status launch_means(const Quantise& a, unsigned slots, cudaStream_t stream) {
  const auto parts = [&](int columns) {
    return static_cast<unsigned>((a.columns + columns - 1) / columns);
  };
  const unsigned heads = grid_y(a.heads);
  TESSERA_RETURN_IF_ERROR(launch_kernel("add_keys", reinterpret_cast<const void*>(&add_keys),
                                        dim3(slots, heads, parts(kColumnsOfSum)), kThreadsOfSum, 0,
                                        &a, stream));
  return launch_kernel("take_means", reinterpret_cast<const void*>(&take_means),
                       dim3(static_cast<unsigned>(a.p.batch), heads, parts(kThreadsOfSum)),
                       kThreadsOfSum, 0, &a, stream);
}

}  // namespace

Status launch_quantise(const Problem& problem, const Params& p, const Rounded& to,
                       cudaStream_t stream, const ValuesByColumns* values) {
  const auto key_slots =
      static_cast<unsigned>(num_tile_slots(p.thd_k, p.sk, p.batch, kKeysOfScale));
  const auto row_slots =
      static_cast<unsigned>(num_tile_slots(p.thd_q, p.sq, p.batch, kRowsOfQueries));
  if (key_slots == 0 || row_slots == 0) return {};
  for (const int index : {TESSERA_K, TESSERA_V}) {
    Quantise a = of_tensor(problem, p, to, index);
    a.bytes = index == TESSERA_K ? to.k : to.v;
    a.scale = index == TESSERA_K ? to.k_scale : to.v_scale;
    if (a.smooths) TESSERA_RETURN_IF_ERROR(launch_means(a, key_slots, stream));
    const bool by_columns_of_v = index == TESSERA_V && values;
    if (by_columns_of_v) a.values = *values;
    const Status queued = by_columns<kKeysOfScale, 8, 16>(a.columns, [&](auto block) {
      using B = decltype(block);
      auto* kernel = reinterpret_cast<const void*>(&round_keys<B, false>);
      if constexpr (B::kLanes * B::kPer <= kMostColumnsOfValues) {
        if (by_columns_of_v) kernel = reinterpret_cast<const void*>(&round_keys<B, true>);
      }
      return launch_kernel("round_keys", kernel, dim3(key_slots, grid_y(a.heads)), B::kThreads, 0,
                           &a, stream);
    });
    TESSERA_RETURN_IF_ERROR(queued);
  }
  for (const int index : {TESSERA_Q, TESSERA_DO}) {
    if (index == TESSERA_DO && !to.grad_o) continue;
    Quantise a = of_tensor(problem, p, to, index);
    a.bytes = index == TESSERA_Q ? to.q : to.grad_o;
    a.scale = index == TESSERA_Q ? to.q_scale : to.do_scale;
    const bool wide = problem.tensor[index].dtype == TESSERA_FP32;
    const Status queued = by_columns<kRowsOfQueries, 8, 8>(a.columns, [&](auto block) {
      using B = decltype(block);
      const auto* kernel = wide ? reinterpret_cast<const void*>(&round_rows<B, uint32_t>)
                                : reinterpret_cast<const void*>(&round_rows<B, uint16_t>);
      return launch_kernel("round_rows", kernel, dim3(row_slots, grid_y(a.heads)), B::kThreads, 0,
                           &a, stream);
    });
    TESSERA_RETURN_IF_ERROR(queued);
  }
  return {};
}

}  // namespace tessera::cuda
