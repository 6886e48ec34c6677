// SPDX-License-Identifier: Apache-2.0
#include "cpu/utilities/row_sums.h"

#include <algorithm>
#include <cstring>

#include "core/problem/dtype.h"
#include "cpu/pool.h"
#include "cpu/simd/kernels.h"

namespace tessera::cpu {
namespace {

constexpr int64_t kPiece = 256;          // columns summed at a time, on the stack
constexpr int64_t kBytesOfTask = 65536;  // what is worth a task of its own

char* at(const RowSums& args, const tessera_rows& rows, int64_t r, int64_t h) {
  if (rows.index >= 0) r = static_cast<const int64_t*>(args.tensors[rows.index])[r];
  return static_cast<char*>(args.tensors[rows.tensor]) + rows.offset + r * rows.row + h * rows.head;
}

// One head of one row, of any floats.
void sum_exactly(const RowSums& args, const tessera_row_sum& sum, int64_t r, int64_t h) {
  char* const to = at(args, sum.to, r, h);
  for (int64_t c = 0; c < sum.columns; ++c) {
    double value = 0;
    for (int t = 0; t < sum.num_terms; ++t) {
      const tessera_rows& term = sum.term[t];
      value += load_element(at(args, term, r, h), c, term.dtype);
    }
    store_element(to, c, sum.to.dtype, value);
  }
}

void sum_in_fp32(const RowSums& args, const tessera_row_sum& sum, int64_t r, int64_t h) {
  const Kernels& level = kernels();
  char* const to = at(args, sum.to, r, h);
  for (int64_t c = 0; c < sum.columns; c += kPiece) {
    const int64_t count = std::min(kPiece, sum.columns - c);
    float total[kPiece] = {};
    for (int t = 0; t < sum.num_terms; ++t) {
      const tessera_rows& term = sum.term[t];
      level.add_row(term.dtype, at(args, term, r, h) + c * size_of(term.dtype), count, 1, total);
    }
    level.round_row(sum.to.dtype, total, count, to + c * size_of(sum.to.dtype));
  }
}

void sum_row(const RowSums& args, const tessera_row_sum& sum, int64_t r) {
  bool is_exact = sum.to.dtype == TESSERA_FP64;
  for (int t = 0; t < sum.num_terms; ++t) is_exact |= sum.term[t].dtype == TESSERA_FP64;
  const bool is_copy = sum.num_terms == 1 && sum.term[0].dtype == sum.to.dtype;
  const int64_t bytes = sum.columns * size_of(sum.to.dtype);
  for (int64_t h = 0; h < sum.heads; ++h) {
    if (is_copy) {
      std::memmove(at(args, sum.to, r, h), at(args, sum.term[0], r, h), static_cast<size_t>(bytes));
    } else {
      (is_exact ? sum_exactly : sum_in_fp32)(args, sum, r, h);
    }
  }
}

}  // namespace

void sum_rows(const RowSums& args, const Buffers& context) {
  for (int64_t i = 0; i < args.num_sums; ++i) {
    const tessera_row_sum& sum = args.sums[i];
    const int64_t bytes = sum.heads * sum.columns * size_of(sum.to.dtype);
    if (bytes == 0) continue;
    const int64_t rows = std::max(kBytesOfTask / bytes, int64_t{1});  // of a task
    parallel_for(context, (sum.rows + rows - 1) / rows, [&](int64_t task, int) {
      for (int64_t r = task * rows; r < std::min((task + 1) * rows, sum.rows); ++r) {
        sum_row(args, sum, r);
      }
    });
  }
}

}  // namespace tessera::cpu
