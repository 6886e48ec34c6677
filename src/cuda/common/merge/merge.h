// SPDX-License-Identifier: Apache-2.0
// The small kernels that every CUDA folder shares. All queue on a stream and return; none
// allocates.
#pragma once

#include "core/choose/backend.h"
#include "cuda/common/divisor.h"
#include "cuda/common/launch.h"

namespace tessera::cuda {

// o = sum_p exp(lse_p - lse) o_p, lse = log sum_p exp(lse_p) over parts of one shape, in order. A
// part whose lse is -inf is not read. Views as o [b, sq, hq, dv] and lse [b, hq, sq]; lse out may
// be null.
inline constexpr int kMaxMergeParts = 32;
struct MergePart {
  View o, lse;
};
template <int kParts>
struct MergeLaunchOf {
  int num_parts;
  int32_t batch, sq, hq, dv;
  View o, lse;
  MergePart part[kParts];
};
using MergeLaunch = MergeLaunchOf<kMaxMergeParts>;
Status launch_merge(const MergeLaunch& merge, cudaStream_t stream);

// The merging into o and lse of a forward pass, without parts so far.
inline MergeLaunch merge_into(const Params& p) {
  MergeLaunch merge{};
  merge.batch = p.thd_q ? 1 : p.batch;
  merge.sq = p.sq;
  merge.hq = p.hq;
  merge.dv = p.dv;
  merge.o = p.tensor[TESSERA_O];
  merge.lse = p.tensor[TESSERA_LSE];
  return merge;
}

// The same of a pass whose keys are cut into up to kMaxMergeParts: the parts are fp32, o [parts, rows of
// q, hq, dv] and lse [parts, rows of q, hq], one behind the other.
struct PartsMerge {
  int num_parts;
  int rows;  // of a part: rows of q x hq
  int dv;
  Divisor hq, sq;
  View o, lse;
  float *part_o, *part_lse;

  static PartsMerge of(const Params& p, int parts, float* part_o, float* part_lse) {
    const int batch = p.thd_q ? 1 : p.batch;
    return {parts,
            batch * p.sq * p.hq,
            p.dv,
            Divisor::of(p.hq),
            Divisor::of(p.sq),
            p.tensor[TESSERA_O],
            p.tensor[TESSERA_LSE],
            part_o,
            part_lse};
  }
  // The first part.
  MergePart first() const {
    const int64_t row = dv, query = row * hq.divisor, batch = query * sq.divisor;
    return {{part_o, {batch, query, row, 1}, TESSERA_FP32, 4},
            {part_lse, {batch / row, 1, hq.divisor, 0}, TESSERA_FP32, 4}};
  }
};
// overlaps: the launch may overlap with those before and behind it (launch_overlapping).
Status launch_merge(const PartsMerge& merge, bool overlaps, cudaStream_t stream);

// tessera_merge: any number of parts. As many as a launch has room for are summed in fp32; what
// these make is the first part of the next ones, rounded to o's dtype.
inline constexpr int kMaxMergePartsAtOnce = 320;
static_assert(sizeof(MergeLaunchOf<kMaxMergePartsAtOnce>) <= 32764, "arguments of a kernel");
Status merge(const MergeArgs& args, const Buffers& context, const Device& device);

// tessera_dropout_mask.
Status dropout_mask(const DropoutMaskArgs& args, const Buffers& context, const Device& device);

// to = from, rounded to to's dtype, or to += from; of fp32, bf16 or fp16. Views of `extent`.
struct Copy {
  View from, to;
  int64_t extent[4];
  bool adds;
};
Status launch_copy(const Copy& copy, cudaStream_t stream);
// The tensor `index` of one problem to that of another one, which has the same extents.
inline Status launch_copy(const Problem& from, const Buffers& from_buffers, const Problem& to,
                          const Buffers& to_buffers, int index, cudaStream_t stream) {
  const Tensor& t = from.tensor[index];
  if (element_count(t, 4) == 0) return {};
  Copy copy{view_of(t, from_buffers.data[index]),
            view_of(to.tensor[index], to_buffers.data[index]),
            {},
            false};
  std::copy_n(t.extent, 4, copy.extent);
  return launch_copy(copy, stream);
}

// to[i * stride] = value for i < count.
Status launch_fill(float* to, int64_t stride, int count, float value, cudaStream_t stream);

}  // namespace tessera::cuda
