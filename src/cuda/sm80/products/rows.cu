// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "core/problem/scales.h"
#include "cuda/common/element.cuh"
#include "cuda/common/quantise/quantise.h"
#include "cuda/common/sequence.cuh"
#include "cuda/sm80/products/rows.h"

namespace tessera::cuda::sm80 {
namespace {

constexpr int kWarp = 32, kThreads = 256, kTileRows = 64;
constexpr int64_t kMostGridY = 65535;

struct Wide {
  Params p;
  Rounded rounded;
  View own, to;          // the caller's tensor, and the copy
  const uint8_t* bytes;  // E4M3, `pitch` a row; null: the first columns are the caller's own
  const float* scale;
  View scales;            // of an fp8 own; null: 1
  int block, last_block;  // of scales
  int pitch, heads, columns;
  int means;  // columns behind those: of rounded.row, or of ones
  bool ones;
  int first, count, from;  // own[from + i] at column first + i, i < count
  int width;
};

// x = a + b + c in bf16.
__device__ float part_of(float x, int part) {
  float rest = x, rounded = 0;
  for (int i = 0; i <= part; ++i) {
    rounded = __bfloat162float(__float2bfloat16_rn(rest));
    rest -= rounded;
  }
  return rounded;
}

__device__ float own_of(const Wide& a, int64_t at, int column) {
  const int dtype = a.own.dtype;
  const bool fp8 = dtype == TESSERA_E4M3 || dtype == TESSERA_E5M2;
  return fp8 ? load_fp8(a.own.data, at + column, dtype)
             : load_float(a.own.data, at + column, dtype);
}

// A warp has a row.
template <typename Side, bool kKeys>
__global__ void __launch_bounds__(kThreads) widen_columns(const __grid_constant__ Wide a) {
  const Params& p = a.p;
  const TileOfRows tile = tile_of_slot<Side>(p, blockIdx.x, kTileRows);
  const Rows rows = rows_of<Side>(p, tile.n);
  if (tile.begin >= rows.length) return;
  const int lane = threadIdx.x % kWarp;
  for (int head = blockIdx.y; head < a.heads; head += gridDim.y) {
    for (int i = threadIdx.x / kWarp; i < kTileRows; i += kThreads / kWarp) {
      const int row = tile.begin + i;
      if (row < 0 || row >= rows.length) continue;
      const int64_t stored = int64_t{rows.batch} * Side::extent(p) + rows.first + row;
      const int64_t of_row =
          (int64_t{rows.batch} * a.heads + head) * Side::extent(p) + rows.first + row;
      const int64_t own = offset_of(a.own, rows.batch, rows.first + row, head);
      const int64_t to = offset_of(a.to, rows.batch, rows.first + row, head);
      float scale = 1, own_scale = 1;
      if (a.bytes) {
        const int slot = first_key_slot(p.thd_k, p.sk, rows.first, tile.n) + row / kKeysOfScale;
        scale = a.scale[kKeys ? int64_t{head} * a.rounded.key_slots + slot : of_row];
      }
      if (a.scales.data) {
        const int block = a.block > 0 ? min(row / a.block, a.last_block) : 0;
        own_scale =
            static_cast<const float*>(a.scales.data)[offset_of(a.scales, tile.n, head, block)];
      }
      for (int column = lane; column < a.width; column += kWarp) {
        float x = 0;
        if (column < a.columns) {
          x = a.bytes ? scale * load_fp8(a.bytes, (stored * a.heads + head) * a.pitch + column,
                                         TESSERA_E4M3)
                      : own_scale * own_of(a, own, column);
        } else if (column < a.columns + a.means) {
          x = a.ones ? 1 : part_of(a.rounded.row[of_row], column - a.columns);
          if (a.to.dtype == TESSERA_FP32 && !a.ones) x = a.rounded.row[of_row];
        } else if (column >= a.first && column < a.first + a.count) {
          x = own_scale * own_of(a, own, a.from + column - a.first);
        }
        store_float(a.to.data, to + column, a.to.dtype, x);
      }
    }
  }
}

}  // namespace

Status launch_wide(const Problem& problem, const Params& p, const Rounded& rounded,
                   const WideColumns& c, int pass, int index, const View& to, cudaStream_t stream) {
  const Tensor& t = problem.tensor[index];
  const bool keys = index == TESSERA_K || index == TESSERA_V;
  const bool scores = index == TESSERA_Q || index == TESSERA_K;
  Wide a{};
  a.p = p;
  a.rounded = rounded;
  a.own = p.tensor[index];
  a.to = to;
  a.heads = static_cast<int>(t.extent[2]);
  a.columns = static_cast<int>(t.extent[3]);
  a.pitch = static_cast<int>(rounded_like(t).stride[2]);
  a.width = static_cast<int>(scores ? c.dqk : c.dv);
  switch (index) {
    case TESSERA_Q:
      a.bytes = rounded.q, a.scale = rounded.q_scale;
      break;
    case TESSERA_K:
      a.bytes = rounded.k, a.scale = rounded.k_scale;
      break;
    case TESSERA_V:
      a.bytes = rounded.v, a.scale = rounded.v_scale;
      break;
    case TESSERA_DO:
      a.bytes = rounded.grad_o, a.scale = rounded.do_scale;
      break;
  }
  const int of_own = scale_of(index);
  if (!scores && is_fp8(t.dtype) && given(problem, of_own)) {
    const Tensor& scales = problem.tensor[of_own];
    a.scales = p.tensor[of_own];
    a.block = scales.extent[2] > 1 ? problem.q_scale_block : 0;
    a.last_block = static_cast<int>(std::max<int64_t>(scales.extent[2], 1) - 1);
  }
  if (scores) a.means = static_cast<int>(c.means), a.ones = index == TESSERA_K;
  const int64_t own = scores ? c.own_k : c.own_v, from = own * pass;
  if (is_backward(problem) && (scores || index == TESSERA_DO)) {
    a.first = static_cast<int>(scores ? c.first_q + (index == TESSERA_K ? own : 0) : c.first_do);
    a.from = static_cast<int>(from);
    a.count = static_cast<int>(std::clamp<int64_t>(t.extent[3] - from, 0, own));
  }
  const int slots = keys ? num_tile_slots(p.thd_k, p.sk, p.batch, kTileRows)
                         : num_tile_slots(p.thd_q, p.sq, p.batch, kTileRows);
  if (slots == 0 || element_count(t, 4) == 0) return {};
  const dim3 grid(static_cast<unsigned>(slots),
                  static_cast<unsigned>(std::min<int64_t>(a.heads, kMostGridY)));
  const auto* kernel = keys ? reinterpret_cast<const void*>(&widen_columns<SideOfKeys, true>)
                            : reinterpret_cast<const void*>(&widen_columns<SideOfQueries, false>);
  return launch_kernel("widen_columns", kernel, grid, kThreads, 0, &a, stream);
}

}  // namespace tessera::cuda::sm80
