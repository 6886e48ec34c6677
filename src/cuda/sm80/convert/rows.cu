// SPDX-License-Identifier: Apache-2.0
// Both kernels are bound by memory: a thread takes four columns at a time, by one access where the
// tensor's rows allow it.
#include <algorithm>

#include "core/problem/scales.h"
#include "cuda/common/element.cuh"
#include "cuda/common/merge/merge.h"
#include "cuda/common/sequence.cuh"
#include "cuda/sm80/convert/rows.h"

namespace tessera::cuda::sm80 {
namespace {

constexpr int kThreads = 256;
constexpr int kTileRows = 64;
constexpr int kQuad = 4;  // columns
constexpr int64_t kMostGridY = 65535;

__device__ __nv_fp8_interpretation_t format_of(int dtype) {
  return dtype == TESSERA_E4M3 ? __NV_E4M3 : __NV_E5M2;
}

__device__ float2 floats_of(uint32_t pair, int dtype) {
  const __half2_raw halves =
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(pair), format_of(dtype));
  return __half22float2(__half2(halves));
}

// The elements at + 0 ... at + 3, of rows whose vector_bytes hold them.
__device__ float4 load_quad(const void* base, int64_t at, int dtype) {
  if (dtype == TESSERA_FP32) {
    return *reinterpret_cast<const float4*>(static_cast<const float*>(base) + at);
  }
  float2 low, high;
  if (dtype == TESSERA_BF16 || dtype == TESSERA_FP16) {
    const uint2 word = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(base) + at);
    low = dtype == TESSERA_BF16 ? unpack<__nv_bfloat16>(word.x) : unpack<__half>(word.x);
    high = dtype == TESSERA_BF16 ? unpack<__nv_bfloat16>(word.y) : unpack<__half>(word.y);
  } else {
    const auto word = *reinterpret_cast<const uint32_t*>(static_cast<const uint8_t*>(base) + at);
    low = floats_of(word & 0xFFFF, dtype);
    high = floats_of(word >> 16, dtype);
  }
  return {low.x, low.y, high.x, high.y};
}

__device__ void store_quad(void* base, int64_t at, int dtype, const float4& x) {
  if (dtype == TESSERA_FP32) {
    *reinterpret_cast<float4*>(static_cast<float*>(base) + at) = x;
  } else if (dtype == TESSERA_BF16 || dtype == TESSERA_FP16) {
    const bool bf16 = dtype == TESSERA_BF16;
    *reinterpret_cast<uint2*>(static_cast<uint16_t*>(base) + at) = {
        bf16 ? pack<__nv_bfloat16>(x.x, x.y) : pack<__half>(x.x, x.y),
        bf16 ? pack<__nv_bfloat16>(x.z, x.w) : pack<__half>(x.z, x.w)};
  } else {
    const auto pair = [&](float low, float high) -> uint32_t {
      return __nv_cvt_float2_to_fp8x2({low, high}, __NV_SATFINITE, format_of(dtype));
    };
    *reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(base) + at) = pair(x.x, x.y) | pair(x.z, x.w)
                                                                                          << 16;
  }
}

__device__ float load_one(const void* base, int64_t at, int dtype) {
  const bool fp8 = dtype == TESSERA_E4M3 || dtype == TESSERA_E5M2;
  return fp8 ? load_fp8(base, at, dtype) : load_float(base, at, dtype);
}

__device__ void store_one(void* base, int64_t at, int dtype, float x) {
  if (dtype == TESSERA_E4M3 || dtype == TESSERA_E5M2) {
    static_cast<uint8_t*>(base)[at] = __nv_cvt_float_to_fp8(x, __NV_SATFINITE, format_of(dtype));
  } else {
    store_float(base, at, dtype, x);
  }
}

struct Widen {
  Params params;
  View from, to;
  View scale;  // [b|1, h|1, blocks|1]
  int block;   // rows that share a scale; 0: all of a sequence
  int last_block;
  int heads, columns;
  bool by_quads;  // rows of `from` may be read so
};

// A CTA has a tile of rows of one sequence, and of every gridDim.y-th head.
template <typename Side>
__global__ void __launch_bounds__(kThreads) widen_kernel(const __grid_constant__ Widen w) {
  const TileOfRows tile = tile_of_slot<Side>(w.params, blockIdx.x, kTileRows);
  const Rows rows = rows_of<Side>(w.params, tile.n);
  if (tile.begin >= rows.length) return;
  const int quads = (w.columns + kQuad - 1) / kQuad;
  for (int head = blockIdx.y; head < w.heads; head += gridDim.y) {
    for (int item = threadIdx.x; item < kTileRows * quads; item += kThreads) {
      const int row = tile.begin + item / quads, column = item % quads * kQuad;
      if (row < 0 || row >= rows.length) continue;
      const int64_t at = offset_of(w.from, rows.batch, rows.first + row, head) + column;
      float x[kQuad] = {};
      if (w.by_quads && column + kQuad <= w.columns) {
        *reinterpret_cast<float4*>(x) = load_quad(w.from.data, at, w.from.dtype);
      } else {
#pragma unroll
        for (int c = 0; c < kQuad; ++c) {
          if (column + c < w.columns) x[c] = load_one(w.from.data, at + c, w.from.dtype);
        }
      }
      float factor = 1;
      if (w.scale.data) {
        const int block = w.block > 0 ? min(row / w.block, w.last_block) : 0;
        factor = static_cast<const float*>(w.scale.data)[offset_of(w.scale, tile.n, head, block)];
      }
      store_quad(w.to.data, offset_of(w.to, rows.batch, rows.first + row, head) + column,
                 TESSERA_FP32, {factor * x[0], factor * x[1], factor * x[2], factor * x[3]});
    }
  }
}

struct Narrow {
  View from, to;
  const float* scale;  // null: 1
  uint32_t* amax;      // null: not asked
  int64_t rows;        // of all elements of the first axis
  int64_t extent;      // of the second axis
  int heads, columns;
  bool by_quads;  // rows of `to` may be written so
};

// The bits of a positive float grow with it, and those of NaN are above all.
__device__ uint32_t magnitude(float x) { return __float_as_uint(x) & 0x7FFFFFFF; }

// value / scale, brought into what the dtype holds; NaN is outside of nothing.
__device__ float scaled(float value, float scale, float most) {
  value = __fdiv_rn(value, scale);
  return value > most ? most : value < -most ? -most : value;
}

__global__ void __launch_bounds__(kThreads) narrow_kernel(const __grid_constant__ Narrow a) {
  const bool fp8 = a.to.dtype == TESSERA_E4M3 || a.to.dtype == TESSERA_E5M2;
  const float most = a.to.dtype == TESSERA_E4M3 ? 448 : 57344;
  const float scale = a.scale ? *a.scale : 1;
  const int quads = (a.columns + kQuad - 1) / kQuad;
  uint32_t largest = 0;
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const int64_t batch = row / a.extent, i = row % a.extent;
    for (int item = threadIdx.x; item < a.heads * quads; item += kThreads) {
      const int head = item / quads, column = item % quads * kQuad;
      const int64_t at = offset_of(a.to, batch, i, head) + column;
      float x[kQuad];
      *reinterpret_cast<float4*>(x) =
          load_quad(a.from.data, offset_of(a.from, batch, i, head) + column, TESSERA_FP32);
#pragma unroll
      for (int c = 0; c < kQuad; ++c) {
        if (column + c < a.columns) largest = max(largest, magnitude(x[c]));
        if (fp8) x[c] = scaled(x[c], scale, most);
      }
      if (a.by_quads && column + kQuad <= a.columns) {
        store_quad(a.to.data, at, a.to.dtype, *reinterpret_cast<const float4*>(x));
      } else {
#pragma unroll
        for (int c = 0; c < kQuad; ++c) {
          if (column + c < a.columns) store_one(a.to.data, at + c, a.to.dtype, x[c]);
        }
      }
    }
  }
  if (!a.amax) return;
  largest = __reduce_max_sync(~0u, largest);
  if (threadIdx.x % 32 == 0) atomicMax(a.amax, largest);
}

bool fits_quads(const View& view, int64_t columns) {
  return view.vector_bytes >= kQuad * size_of(view.dtype) && columns >= kQuad;
}

}  // namespace

Status launch_widen(const Problem& problem, const Buffers& buffers, int index, const View& to,
                    cudaStream_t stream) {
  const Tensor& t = problem.tensor[index];
  const bool keys = index == TESSERA_K || index == TESSERA_V;
  const int scale = scale_of(index);
  Widen w{};
  w.params = params_of(problem, buffers);
  w.from = w.params.tensor[index];
  w.to = to;
  w.scale = view_of(problem.tensor[scale], buffers.data[scale]);
  w.block = keys ? problem.k_scale_block : problem.q_scale_block;
  w.last_block = static_cast<int>(std::max<int64_t>(problem.tensor[scale].extent[2], 1) - 1);
  w.heads = static_cast<int>(t.extent[2]);
  w.columns = static_cast<int>(t.extent[3]);
  w.by_quads = fits_quads(w.from, t.extent[3]);
  const Params& p = w.params;
  const int slots = keys ? num_tile_slots(p.thd_k, p.sk, p.batch, kTileRows)
                         : num_tile_slots(p.thd_q, p.sq, p.batch, kTileRows);
  if (slots == 0 || element_count(t, 4) == 0) return {};
  const dim3 grid(static_cast<unsigned>(slots),
                  static_cast<unsigned>(std::min<int64_t>(w.heads, kMostGridY)));
  const auto* kernel = keys ? reinterpret_cast<const void*>(&widen_kernel<SideOfKeys>)
                            : reinterpret_cast<const void*>(&widen_kernel<SideOfQueries>);
  return launch_kernel("widen", kernel, grid, kThreads, 0, &w, stream);
}

Status launch_narrow(const Problem& problem, const Buffers& buffers, int index, const View& from,
                     const ColumnPart& part, cudaStream_t stream) {
  constexpr int64_t kMostCtas = 4096;
  const Tensor& t = problem.tensor[index];
  const int scale = scale_of(index), amax = amax_of(index);
  Narrow a{};
  a.from = from;
  a.to = view_of(t, buffers.data[index]);
  a.to.data = static_cast<char*>(a.to.data) + part.first * size_of(t.dtype);
  if (given(problem, scale)) a.scale = static_cast<const float*>(buffers.data[scale]);
  if (given(problem, amax)) {
    auto* const largest = static_cast<float*>(buffers.data[amax]);
    a.amax = reinterpret_cast<uint32_t*>(largest);
    if (part.first == 0) TESSERA_RETURN_IF_ERROR(launch_fill(largest, 1, 1, 0, stream));
  }
  a.rows = t.extent[0] * t.extent[1];
  a.extent = t.extent[1];
  a.heads = static_cast<int>(t.extent[2]);
  a.columns = static_cast<int>(part.count);
  a.by_quads = fits_quads(a.to, part.count) && part.first % kQuad == 0;
  if (element_count(t, 4) == 0 || part.count == 0) return {};
  const dim3 grid(static_cast<unsigned>(std::min(a.rows, kMostCtas)));
  return launch_kernel("narrow", reinterpret_cast<const void*>(&narrow_kernel), grid, kThreads, 0,
                       &a, stream);
}

}  // namespace tessera::cuda::sm80
