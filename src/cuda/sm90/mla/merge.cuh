// SPDX-License-Identifier: Apache-2.0
// How the rows of units that were cut come from their parts.
#pragma once

#include "cuda/sm90/mla/rows.cuh"
#include "cuda/sm90/mla/shape.cuh"

namespace tessera::cuda::sm90 {

// Four columns of a row, those of column_of_part(), summed over parts.
struct MlaSum {
  float reference = -kInfinity, sum = 0;
  float4 o{0, 0, 0, 0};

  // Brings what was added to a reference that is no less, and answers what to subtract from others.
  __device__ __forceinline__ float raise(float to) {
    const float top = to == -kInfinity ? 0 : to, weight = exp2_approx(reference - top);
    reference = to;
    sum *= weight;
    o = {o.x * weight, o.y * weight, o.z * weight, o.w * weight};
    return top;
  }
  __device__ __forceinline__ void add(float of_sum, const float4& x, float weight) {
    sum = fmaf(of_sum, weight, sum);
    o = {fmaf(x.x, weight, o.x), fmaf(x.y, weight, o.y), fmaf(x.z, weight, o.z),
         fmaf(x.w, weight, o.w)};
  }
};

// A CTA has one row of a unit at a time, in groups of threads that have every so many-th of its
// parts; the groups' sums are added at last, in their order. A thread has four columns.
template <typename Element, typename Row>
struct MlaMerge {
  static constexpr int kRows = Mla<Element, Row>::kUnitRows, kColumns = Row::kTile.dv;
  static constexpr int kThreads = kColumns / 4;  // of a group
  static constexpr int kAtOnce = 8;              // parts that a thread waits for
  using Storage = MlaSum[MlaTile::kMostMergeGroups - 1][kThreads];

  static __device__ __forceinline__ void run(const MlaArgs& args, const CutUnit& cut, int row,
                                             Storage& sums_of_groups) {
    const int group = threadIdx.x / kThreads, groups = blockDim.x / kThreads;
    const int thread = threadIdx.x % kThreads;
    const Rows rows = rows_of<SideOfQueries>(args.params, cut.n);
    const MlaRow to = row_of_unit(args, rows, cut.row0, cut.pack * args.pack, row);
    if (!to.owned) return;
    MlaSum total = sum_of_group(args, cut, row, group, groups, 4 * thread);
    if (groups > 1) {
      if (group > 0) sums_of_groups[group - 1][thread] = total;
      __syncthreads();
      for (int i = 1; group == 0 && i < groups; ++i) {
        const MlaSum& other = sums_of_groups[i - 1][thread];
        const float top = total.raise(fmaxf(total.reference, other.reference));
        total.add(other.sum, other.o, exp2_approx(other.reference - top));
      }
      __syncthreads();  // the sums are free
    }
    if (group == 0) store(args, cut.n, to, thread, total);
  }

 private:
  static __device__ __forceinline__ MlaSum sum_of_group(const MlaArgs& args, const CutUnit& cut,
                                                        int row, int group, int groups,
                                                        int column) {
    MlaSum total;
#pragma unroll 1
    for (int part0 = group; part0 < cut.parts; part0 += kAtOnce * groups) {
      float2 sums[kAtOnce];
      float4 x[kAtOnce];
      float largest = total.reference;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int part = part0 + i * groups;
        const bool exists = part < cut.parts;
        const int slot = part == 0 || !exists ? cut.first_slot : cut.next_slots + part;
        const int64_t from = int64_t{slot} * kRows + row;
        const auto* o = reinterpret_cast<const float4*>(args.part_o + from * kColumns + column);
        sums[i] = exists ? __ldcg(args.part_sums + from) : float2{-kInfinity, 0};
        x[i] = exists ? __ldcg(o) : float4{0, 0, 0, 0};
        largest = fmaxf(largest, sums[i].x);
      }
      const float top = total.raise(largest);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) total.add(sums[i].y, x[i], exp2_approx(sums[i].x - top));
    }
    return total;
  }

  static __device__ __forceinline__ void store(const MlaArgs& args, int n, const MlaRow& to,
                                               int thread, const MlaSum& total) {
    float factor = finish_row(args.params, to, total.reference, total.sum, thread == 0);
    if constexpr (Mla<Element, Row>::kFp8) factor *= v_scale_of(args.params, n, to.head);
    // What nobody sees is 0 whatever was added up.
    const bool any = factor != 0;
    const float4& o = total.o;
    auto* const out =
        static_cast<Element*>(args.params.tensor[TESSERA_O].data) + to.o + column_of_part(thread);
    *reinterpret_cast<uint32_t*>(out) = any ? pack<Element>(o.x * factor, o.y * factor) : 0;
    *reinterpret_cast<uint32_t*>(out + 8) = any ? pack<Element>(o.z * factor, o.w * factor) : 0;
  }
};

// CTAs (row, y) have the units y, y + gridDim.y, ..., of which few may have been cut.
template <typename Element, typename Row>
__global__ void __launch_bounds__(MlaTile::kMostMergeGroups* Row::kTile.dv / 4)
    mla_merge(const __grid_constant__ MlaArgs args) {
  using Merge = MlaMerge<Element, Row>;
  __shared__ typename Merge::Storage sums_of_groups;
  wait_for_predecessors();
  const int lane = threadIdx.x % kWarp, step = gridDim.y;
  const int units = min(*args.units_found, args.units);
#pragma unroll 1
  for (int unit0 = blockIdx.y; unit0 < units; unit0 += step * kWarp) {
    const int own = unit0 + step * lane;  // a lane looks at one
    const bool is_cut = own < units && args.cut[own].mark == args.mark && args.cut[own].parts > 1;
#pragma unroll 1
    for (unsigned left = __ballot_sync(kAllLanes, is_cut); left != 0; left &= left - 1) {
      Merge::run(args, args.cut[unit0 + step * (__ffs(left) - 1)], blockIdx.x, sums_of_groups);
    }
  }
}

}  // namespace tessera::cuda::sm90
