// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "core/mask/philox.h"
#include "cuda/common/element.cuh"
#include "cuda/common/merge/merge.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 128;

// What the parts of a row weigh, a warp's: lane p has those of parts p, p + 32, ...
template <int kOwn>
struct Weights {
  float of[kOwn];
  float lse;  // of the row

  // lse_of: of the parts; -inf where there is none.
  __device__ __forceinline__ explicit Weights(const float (&lse_of)[kOwn]) {
    float max = -kInfinity, sum = 0;
#pragma unroll
    for (const float x : lse_of) max = fmaxf(max, x);
#pragma unroll
    for (int i = 16; i > 0; i /= 2) max = fmaxf(max, __shfl_xor_sync(~0u, max, i));
    if (max == -kInfinity) max = 0;
#pragma unroll
    for (int own = 0; own < kOwn; ++own) {
      of[own] = lse_of[own] == -kInfinity ? 0 : exp2_approx((lse_of[own] - max) * kLog2e);
      sum += of[own];
    }
#pragma unroll
    for (int i = 16; i > 0; i /= 2) sum += __shfl_xor_sync(~0u, sum, i);
    lse = sum == 0 ? -kInfinity : max + logf(sum);
#pragma unroll
    for (float& w : of) w = sum == 0 ? 0 : w / sum;
  }
};

// One warp a row.
template <int kParts>
__global__ void __launch_bounds__(kThreads)
    merge_kernel(const __grid_constant__ MergeLaunchOf<kParts> m) {
  static_assert(kParts % 32 == 0);
  constexpr int kOwn = kParts / 32;
  const int64_t row = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32;
  if (row >= int64_t{m.batch} * m.sq * m.hq) return;
  const int head = static_cast<int>(row % m.hq);
  const int64_t query = row / m.hq % m.sq, n = row / m.hq / m.sq;

  float lse_of[kOwn];
#pragma unroll
  for (int own = 0; own < kOwn; ++own) {
    const int p = own * 32 + lane;
    lse_of[own] = -kInfinity;
    if (p < m.num_parts) {
      const View& lse = m.part[p].lse;
      lse_of[own] = static_cast<const float*>(lse.data)[offset_of(lse, n, head, query)];
    }
  }
  const Weights<kOwn> weights(lse_of);

  for (int c0 = 0; c0 < m.dv; c0 += 32) {
    const int c = c0 + lane;
    float value = 0;
#pragma unroll
    for (int own = 0; own < kOwn; ++own) {
      const int count = min(m.num_parts - own * 32, 32);
#pragma unroll(kOwn == 1 ? 4 : 1)
      for (int p = 0; p < count; ++p) {
        const float w = __shfl_sync(~0u, weights.of[own], p);
        if (w == 0 || c >= m.dv) continue;
        const View& o = m.part[own * 32 + p].o;
        value += w * load_float(o.data, offset_of(o, n, query, head, c), o.dtype);
      }
    }
    if (c < m.dv) store_float(m.o.data, offset_of(m.o, n, query, head, c), m.o.dtype, value);
  }
  if (m.lse.data && lane == 0) {
    static_cast<float*>(m.lse.data)[offset_of(m.lse, n, head, query)] = weights.lse;
  }
}

// One warp for 32 columns of a row: lane p holds the weight of part p. Parts are read eight at a time,
// whatever they weigh: a loop that reads one after the other waits for each.
__global__ void __launch_bounds__(kThreads)
    merge_parts_kernel(const __grid_constant__ PartsMerge m) {
  constexpr int kAtOnce = 8;
  const int row = static_cast<int>((blockIdx.x * kThreads + threadIdx.x) / 32);
  const int lane = threadIdx.x % 32, column = static_cast<int>(blockIdx.y) * 32 + lane;
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\n\tgriddepcontrol.wait;" ::: "memory");
#endif
  if (row >= m.rows) return;
  const bool has_part = lane < m.num_parts;
  const float lse_of[] = {has_part ? __ldcg(m.part_lse + int64_t{lane} * m.rows + row)
                                   : -kInfinity};
  const float* const o = m.part_o + int64_t{row} * m.dv + column;
  const int64_t part = int64_t{m.rows} * m.dv;
  const auto read = [&](int first, float(&x)[kAtOnce]) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const bool exists = first + i < m.num_parts && column < m.dv;
      x[i] = exists ? __ldcg(o + (first + i) * part) : 0;
    }
  };
  float x[kAtOnce], value = 0;
  read(0, x);
  const Weights<1> weights(lse_of);
  for (int first = 0;;) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float w = __shfl_sync(~0u, weights.of[0], first + i);
      if (w != 0) value = fmaf(w, x[i], value);  // a part that saw nothing may hold anything
    }
    if ((first += kAtOnce) >= m.num_parts) break;
    read(first, x);
  }
  const int query = m.hq.quotient(row), head = row - query * m.hq.divisor;
  const int n = m.sq.quotient(query), i = query - n * m.sq.divisor;
  if (column < m.dv) store_float(m.o.data, offset_of(m.o, n, i, head, column), m.o.dtype, value);
  if (m.lse.data && column == 0) {
    static_cast<float*>(m.lse.data)[offset_of(m.lse, n, head, i)] = weights.lse;
  }
}

__global__ void __launch_bounds__(kThreads)
    dropout_mask_kernel(const __grid_constant__ DropoutMaskArgs a) {
  const Dropout dropout = Dropout::make(a.rng_state[0], a.rng_state[1], a.threshold);
  const DropoutHeads heads = DropoutHeads::of(a.rng_state, 1, a.rng_words, a.hq);
  const int64_t count = a.b * a.hq * a.sq * a.sk, step = int64_t{gridDim.x} * kThreads;
  for (int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x; at < count; at += step) {
    const int64_t j = at % a.sk, i = at / a.sk % a.sq, head = at / a.sk / a.sq;
    const int64_t n = head / a.hq;
    const int64_t row = a.q_start ? a.q_start[n] + i : i, key = a.k_start ? a.k_start[n] + j : j;
    a.keep[at] = dropout.keep(heads.index(n, head % a.hq), row, key);
  }
}

// One warp for all rows of an element of the first two axes.
__global__ void __launch_bounds__(kThreads) copy_kernel(const __grid_constant__ Copy copy) {
  constexpr int kWarps = kThreads / 32;
  const View &from = copy.from, &to = copy.to;
  for (int64_t a = blockIdx.y; a < copy.extent[0]; a += gridDim.y) {
    for (int64_t b = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; b < copy.extent[1];
         b += int64_t{gridDim.x} * kWarps) {
      for (int64_t c = 0; c < copy.extent[2]; ++c) {
        for (int64_t d = threadIdx.x % 32; d < copy.extent[3]; d += 32) {
          float value = load_float(from.data, offset_of(from, a, b, c, d), from.dtype);
          const int64_t at = offset_of(to, a, b, c, d);
          if (copy.adds) value += load_float(to.data, at, to.dtype);
          store_float(to.data, at, to.dtype, value);
        }
      }
    }
  }
}

struct Fill {
  float* to;
  int64_t stride;
  int count;
  float value;
};
__global__ void __launch_bounds__(kThreads) fill_kernel(const __grid_constant__ Fill f) {
  for (int i = threadIdx.x; i < f.count; i += kThreads) f.to[i * f.stride] = f.value;
}

View view_of(const Tensor& t, const void* data, int rank) {
  View view{};
  view.data = const_cast<void*>(data);
  view.dtype = t.dtype;
  view.vector_bytes = 1;
  for (int axis = 0; axis < rank; ++axis)
    view.stride[axis] = t.extent[axis] > 1 ? t.stride[axis] : 0;
  return view;
}

template <int kParts>
Status launch(const MergeLaunchOf<kParts>& merge, cudaStream_t stream) {
  const int64_t rows = int64_t{merge.batch} * merge.sq * merge.hq;
  if (rows == 0) return {};
  const int64_t ctas = (rows * 32 + kThreads - 1) / kThreads;
  return launch_kernel("merge", reinterpret_cast<const void*>(&merge_kernel<kParts>),
                       dim3(static_cast<unsigned>(ctas)), kThreads, 0, &merge, stream);
}

template <int kParts>
Status merge_in_rounds(const MergeArgs& args, cudaStream_t stream) {
  MergeLaunchOf<kParts> m{};
  m.batch = static_cast<int32_t>(args.o.extent[0]);
  m.sq = static_cast<int32_t>(args.o.extent[1]);
  m.hq = static_cast<int32_t>(args.o.extent[2]);
  m.dv = static_cast<int32_t>(args.o.extent[3]);
  m.o = view_of(args.o, args.o_out, 4);
  m.lse = view_of(args.lse, args.lse_out, 3);
  for (int64_t next = 0; next < args.num_parts;) {
    m.num_parts = 0;
    if (next > 0) m.part[m.num_parts++] = {m.o, m.lse};
    for (; m.num_parts < kParts && next < args.num_parts; ++next) {
      m.part[m.num_parts++] = {view_of(args.o_parts[next], args.o_data[next], 4),
                               view_of(args.lse_parts[next], args.lse_data[next], 3)};
    }
    TESSERA_RETURN_IF_ERROR(launch(m, stream));
  }
  return {};
}

}  // namespace

Status launch_merge(const MergeLaunch& merge, cudaStream_t stream) { return launch(merge, stream); }

Status launch_merge(const PartsMerge& merge, bool overlaps, cudaStream_t stream) {
  if (merge.rows == 0) return {};
  const auto count = [](int items, int of_each) {
    return static_cast<unsigned>((items + of_each - 1) / of_each);
  };
  const dim3 grid(count(merge.rows, kThreads / 32), count(merge.dv, 32));
  const auto* const function = reinterpret_cast<const void*>(&merge_parts_kernel);
  return overlaps ? launch_overlapping("merge", function, grid, kThreads, 0, &merge, stream)
                  : launch_kernel("merge", function, grid, kThreads, 0, &merge, stream);
}

Status merge(const MergeArgs& args, const Buffers& context, const Device& device) {
  if (args.o.dtype == TESSERA_FP64) {
    return Status(TESSERA_REFUSED,
                  "o.dtype=fp64: CUDA merges fp32, bf16 and fp16; merge on the CPU");
  }
  const DeviceScope scope(device.ordinal);
  TESSERA_RETURN_IF_ERROR(scope.status());
  const auto stream = static_cast<cudaStream_t>(context.stream);
  return args.num_parts <= kMaxMergeParts ? merge_in_rounds<kMaxMergeParts>(args, stream)
                                          : merge_in_rounds<kMaxMergePartsAtOnce>(args, stream);
}

Status dropout_mask(const DropoutMaskArgs& args, const Buffers& context, const Device& device) {
  const int64_t count = args.b * args.hq * args.sq * args.sk;
  if (count == 0) return {};
  const DeviceScope scope(device.ordinal);
  TESSERA_RETURN_IF_ERROR(scope.status());
  const int64_t ctas = std::min<int64_t>((count + kThreads - 1) / kThreads, 1 << 16);
  return launch_kernel("dropout_mask", reinterpret_cast<const void*>(&dropout_mask_kernel),
                       dim3(static_cast<unsigned>(ctas)), kThreads, 0, &args,
                       static_cast<cudaStream_t>(context.stream));
}

Status launch_copy(const Copy& copy, cudaStream_t stream) {
  constexpr int64_t kRowsOfCta = kThreads / 32, kMostGridX = 1 << 16, kMostGridY = 65535;
  if (copy.extent[0] == 0 || copy.extent[1] == 0) return {};
  const int64_t ctas = (copy.extent[1] + kRowsOfCta - 1) / kRowsOfCta;
  const dim3 grid(static_cast<unsigned>(std::min(ctas, kMostGridX)),
                  static_cast<unsigned>(std::min(copy.extent[0], kMostGridY)));
  return launch_kernel("copy", reinterpret_cast<const void*>(&copy_kernel), grid, kThreads, 0,
                       &copy, stream);
}

Status launch_fill(float* to, int64_t stride, int count, float value, cudaStream_t stream) {
  const Fill fill{to, stride, count, value};
  return launch_kernel("fill", reinterpret_cast<const void*>(&fill_kernel), dim3(1), kThreads, 0,
                       &fill, stream);
}

}  // namespace tessera::cuda
