// SPDX-License-Identifier: Apache-2.0
// Bound by memory: v is read and V^T written once, by 16 bytes a thread.
#include <algorithm>

#include "core/count.h"
#include "cuda/common/element.cuh"
#include "cuda/common/sequence.cuh"
#include "cuda/sm90/fp8/transpose.h"
#include "cuda/sm90/machine/ptx.cuh"

namespace tessera::cuda::sm90 {
namespace {

constexpr int kPart = 16;                 // bytes of an access
constexpr int kWords = kBlockOfKeys / 4;  // of a head dim in a block
constexpr int64_t kMostGridY = 65535;

// A CTA has a block of keys of one sequence and kDims head dims, of every gridDim.y-th head; a
// thread 16 dims of the four keys that make a word of V^T.
template <int kDims>
__global__ void __launch_bounds__(kDims* kWords / kPart)
    transpose(const __grid_constant__ TransposeParams a) {
  constexpr int kParts = kDims / kPart, kThreads = kParts * kWords;
  // Words of a warp stand in different banks: it writes kParts parts of 32 / kParts words.
  __shared__ alignas(kPart) uint32_t out[kDims][kWords];
  const auto place = [](int dim, int word) { return word ^ dim / kPart * (32 / kParts); };
  launch_dependents();
  wait_for_predecessors();
  const Params& p = a.problem;
  const View& v = p.tensor[TESSERA_V];
  const TileOfRows block = tile_of_slot<SideOfKeys>(p, blockIdx.x, kBlockOfKeys);
  const Rows keys = rows_of<SideOfKeys>(p, block.n);
  if (block.begin < 0 || (p.thd_k && block.begin >= keys.length)) return;
  const int start = transposed_start(p.thd_k, keys.first, block.n) + block.begin;
  const int part = threadIdx.x % kParts, word = threadIdx.x / kParts;
  const int key = block.begin + word / 4 * 16 + word % 4 * 2;  // and 1, 8 and 9 behind it
  const int dims = (p.dv + kDims - 1) / kDims;
  for (int item = blockIdx.y; item < p.hk * dims; item += gridDim.y) {
    const int head = item / dims, dim0 = item % dims * kDims;
    uint32_t x[4][4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = key + i % 2 + i / 2 * 8, dim = dim0 + part * kPart;
      if (row >= keys.length || dim >= p.dv) continue;
      const int64_t at = offset_of(v, keys.batch, keys.first + row, head) + dim;
      const uint4 bytes = *reinterpret_cast<const uint4*>(static_cast<const uint8_t*>(v.data) + at);
      x[i][0] = bytes.x, x[i][1] = bytes.y, x[i][2] = bytes.z, x[i][3] = bytes.w;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // a word of each key: four dims
      const uint32_t low0 = __byte_perm(x[0][i], x[1][i], 0x5140);
      const uint32_t low2 = __byte_perm(x[0][i], x[1][i], 0x7362);
      const uint32_t high0 = __byte_perm(x[2][i], x[3][i], 0x5140);
      const uint32_t high2 = __byte_perm(x[2][i], x[3][i], 0x7362);
      const int dim = part * kPart + 4 * i, at = place(dim, word);
      out[dim][at] = __byte_perm(low0, high0, 0x5410);
      out[dim + 1][at] = __byte_perm(low0, high0, 0x7632);
      out[dim + 2][at] = __byte_perm(low2, high2, 0x5410);
      out[dim + 3][at] = __byte_perm(low2, high2, 0x7632);
    }
    __syncthreads();
    uint8_t* const to = a.to + keys.batch * a.stride_batch + head * a.stride_head;
#pragma unroll
    for (int i = threadIdx.x; i < kDims * kWords / 4; i += kThreads) {
      const int dim = i / (kWords / 4), of_row = i % (kWords / 4) * 4;  // words
      const int at = start + of_row * 4;
      if (dim0 + dim >= p.dv || at >= a.keys) continue;
      *reinterpret_cast<uint4*>(to + int64_t{dim0 + dim} * a.keys + at) =
          *reinterpret_cast<const uint4*>(&out[dim][place(dim, of_row)]);
    }
    __syncthreads();
  }
}

}  // namespace

Status launch_transpose(const Problem& problem, const Params& params, void* to,
                        cudaStream_t stream) {
  TransposeParams a{};
  a.problem = params;
  a.to = static_cast<uint8_t*>(to);
  a.keys = static_cast<int>(transposed_keys(problem).value());
  a.stride_head = int64_t{a.keys} * params.dv;
  a.stride_batch = a.stride_head * params.hk;
  const int slots = num_tile_slots(params.thd_k, params.sk, params.batch, kBlockOfKeys);
  const bool narrow = params.dv <= 64;
  const int dims = narrow ? 64 : 128;
  const int64_t items = int64_t{params.hk} * ((params.dv + dims - 1) / dims);
  const dim3 grid(static_cast<unsigned>(slots), static_cast<unsigned>(std::min(items, kMostGridY)));
  const auto* kernel = narrow ? reinterpret_cast<const void*>(&transpose<64>)
                              : reinterpret_cast<const void*>(&transpose<128>);
  return launch_overlapping("transpose", kernel, grid, dims * kWords / kPart, 0, &a, stream);
}

}  // namespace tessera::cuda::sm90
