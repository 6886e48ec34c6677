// SPDX-License-Identifier: Apache-2.0
// The copy is bound by memory: a thread writes 16 bytes, neighbours side by side, and reads their 8
// elements by the widest accesses that rows allow which begin anywhere.
#include "cuda/common/divisor.h"
#include "cuda/common/launch.h"
#include "cuda/sm90/bias/pad.h"
#include "cuda/sm90/bias/problem.h"

namespace tessera::cuda::sm90 {
namespace {

constexpr int kThreads = 256;
constexpr int kUnit = 8;  // elements of a thread

struct Pad {
  const uint16_t* from;
  int64_t stride[3];  // of it
  uint4* to;
  Divisor units, rows, heads;  // of a row, of a head, of a sequence
  int columns;                 // of a row that are keys
  int all_units;
};

// Rows begin at multiples of 8 bytes.
__device__ __forceinline__ uint4 load_in_quads(const uint16_t* from) {
  const uint2 low = *reinterpret_cast<const uint2*>(from);
  const uint2 high = *reinterpret_cast<const uint2*>(from + 4);
  return {low.x, low.y, high.x, high.y};
}

// Rows begin anywhere: three words from the first multiple of 4 bytes on, and the two elements that
// are left. All threads do the same, wherever their rows begin.
__device__ __forceinline__ uint4 load_in_pairs(const uint16_t* from) {
  const int odd = reinterpret_cast<uintptr_t>(from) / 2 % 2;
  const auto* words = reinterpret_cast<const uint32_t*>(from + odd);
  const uint32_t a = words[0], b = words[1], c = words[2];
  const uint32_t other = from[odd ? 0 : 6], last = from[7];
  if (!odd) return {a, b, c, other | last << 16};
  return {other | a << 16, __funnelshift_l(a, b, 16), __funnelshift_l(b, c, 16),
          c >> 16 | last << 16};
}

// Fewer than all elements, and zeros.
__device__ __forceinline__ uint4 load_some(const uint16_t* from, int count) {
  uint32_t x[4] = {};
#pragma unroll
  for (int i = 0; i < kUnit - 1; ++i) {
    if (i < count) x[i / 2] |= static_cast<uint32_t>(from[i]) << i % 2 * 16;
  }
  return {x[0], x[1], x[2], x[3]};
}

template <bool kInQuads>
__global__ void __launch_bounds__(kThreads) pad_bias(const __grid_constant__ Pad a) {
  const int unit = blockIdx.x * kThreads + threadIdx.x;
  if (unit >= a.all_units) return;
  const int row = a.units.quotient(unit), key = (unit - row * a.units.divisor) * kUnit;
  const int head = a.rows.quotient(row), query = row - head * a.rows.divisor;  // head of the batch
  const int n = a.heads.quotient(head), h = head - n * a.heads.divisor;
  const uint16_t* from = a.from + n * a.stride[0] + h * a.stride[1] + query * a.stride[2] + key;
  a.to[unit] = key + kUnit > a.columns ? load_some(from, a.columns - key)
               : kInQuads              ? load_in_quads(from)
                                       : load_in_pairs(from);
}

}  // namespace

Status launch_pad_bias(const Tensor& bias, void* data, const Tensor& to, void* copy,
                       cudaStream_t stream) {
  const int64_t units_of_row = to.stride[2] / kUnit;
  const int64_t units = rows_of_padded(to) * units_of_row;
  Pad a{};
  a.from = static_cast<const uint16_t*>(data);
  for (int axis = 0; axis < 3; ++axis) a.stride[axis] = bias.stride[axis];
  a.to = static_cast<uint4*>(copy);
  a.units = Divisor::of(static_cast<int>(units_of_row));
  a.rows = Divisor::of(static_cast<int>(to.extent[2]));
  a.heads = Divisor::of(static_cast<int>(distinct(to, 1)));
  a.columns = static_cast<int>(to.extent[3]);
  a.all_units = static_cast<int>(units);
  const bool in_quads = view_of(bias, data).vector_bytes >= 8;
  const auto kernel = in_quads ? pad_bias<true> : pad_bias<false>;
  return launch_kernel("pad_bias", reinterpret_cast<const void*>(kernel),
                       dim3(static_cast<unsigned>((units + kThreads - 1) / kThreads)), kThreads, 0,
                       &a, stream);
}

}  // namespace tessera::cuda::sm90
