// SPDX-License-Identifier: Apache-2.0
// Attention over a union of disjoint key sets: o = sum_p exp(lse_p - lse) o_p, in order of the
// parts.
#include "cpu/utilities/merge.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/pool.h"
#include "cpu/simd/kernels.h"

namespace tessera::cpu {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int64_t kPiece = 256;  // head dims summed at a time, on the stack

struct Row {
  int64_t n, i, h;
};

double lse_of(const MergeArgs& args, int64_t part, const Row& row) {
  const Tensor& t = args.lse_parts[part];
  return load_element(args.lse_data[part], offset_of(t, row.n, row.h, row.i), t.dtype);
}

// m + log(sum_p exp(lse_p - m)); -inf where every part is.
double merged_lse(const MergeArgs& args, const Row& row) {
  double m = -kInfinity;
  for (int64_t p = 0; p < args.num_parts; ++p) {
    const double lse = lse_of(args, p, row);
    if (!(lse <= m)) m = lse;  // NaN is taken, and stays
    if (std::isnan(m)) return m;
  }
  if (m == -kInfinity) return m;
  double sum = 0;
  for (int64_t p = 0; p < args.num_parts; ++p) sum += std::exp(lse_of(args, p, row) - m);
  return m + std::log(sum);
}

// What a part whose lse is lse_p weighs; the caller passes over those of -inf.
double weight_of(double lse_p, double lse) { return std::exp(lse_p - lse); }

void merge_row(const MergeArgs& args, const Row& row, double lse) {
  const Kernels& level = kernels();
  const int64_t dv = args.o.extent[3], size = size_of(args.o.dtype);
  const int32_t part_dtype = args.o_parts[0].dtype;
  char* to = static_cast<char*>(args.o_out) + offset_of(args.o, row.n, row.i, row.h) * size;
  for (int64_t d = 0; d < dv; d += kPiece) {
    const int64_t count = std::min(kPiece, dv - d);
    float sum[kPiece] = {};
    for (int64_t p = 0; p < args.num_parts; ++p) {
      const double lse_p = lse_of(args, p, row);
      if (lse_p == -kInfinity) continue;
      const int64_t at = offset_of(args.o_parts[p], row.n, row.i, row.h, d);
      const auto* from = static_cast<const char*>(args.o_data[p]) + at * size_of(part_dtype);
      level.add_row(part_dtype, from, count, static_cast<float>(weight_of(lse_p, lse)), sum);
    }
    level.round_row(args.o.dtype, sum, count, to + d * size);
  }
}

void merge_row_fp64(const MergeArgs& args, const Row& row, double lse) {
  double* to = static_cast<double*>(args.o_out) + offset_of(args.o, row.n, row.i, row.h);
  std::fill_n(to, args.o.extent[3], 0.0);
  for (int64_t p = 0; p < args.num_parts; ++p) {
    const double lse_p = lse_of(args, p, row);
    if (lse_p == -kInfinity) continue;
    const double weight = weight_of(lse_p, lse);
    const auto* from = static_cast<const double*>(args.o_data[p]) +
                       offset_of(args.o_parts[p], row.n, row.i, row.h);
    for (int64_t d = 0; d < args.o.extent[3]; ++d) to[d] += weight * from[d];
  }
}

}  // namespace

void merge(const MergeArgs& args, const Buffers& context) {
  const int64_t sq = args.o.extent[1], hq = args.o.extent[2];
  parallel_for(context, args.o.extent[0] * sq, [&](int64_t task, int) {
    for (int64_t h = 0; h < hq; ++h) {
      const Row row{task / sq, task % sq, h};
      const double lse = merged_lse(args, row);
      store_element(args.lse_out, offset_of(args.lse, row.n, h, row.i), args.lse.dtype, lse);
      if (args.o.dtype == TESSERA_FP64)
        merge_row_fp64(args, row, lse);
      else
        merge_row(args, row, lse);
    }
  });
}

}  // namespace tessera::cpu
