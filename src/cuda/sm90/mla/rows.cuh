// SPDX-License-Identifier: Apache-2.0
// What becomes of a row of a unit: where it is stored, and its o and lse.
#pragma once

#include <cfloat>

#include "cuda/common/finish.cuh"
#include "cuda/sm90/forward/output.cuh"
#include "cuda/sm90/mla/params.h"

namespace tessera::cuda::sm90 {

// Four floats of a part's row hold the columns from c on and c + 8 on, two each: what a lane has of
// 16 columns of wgmma's sums, so that it stores 16 bytes and four lanes 64. Returns c of the i-th four.
__device__ inline int column_of_part(int i) { return i / 4 * 16 + i % 4 * 2; }

// A row of a unit, as stored.
struct MlaRow {
  int head;
  bool exists, owned;  // a query; to be written, as a query or as what lies around them
  int64_t o, lse;      // elements from the beginning of o and of lse
};

__device__ inline MlaRow row_of_unit(const MlaArgs& args, const Rows& q, int row0, int head0,
                                     int row) {
  const Params& p = args.params;
  const int query = row0 + (row >> args.pack_shift);
  MlaRow result;
  result.head = head0 + (row & (args.pack - 1));
  result.exists = query >= 0 && query < q.length;
  result.owned = query >= q.owned_lo && query < q.owned_hi;
  result.o = offset_of(p.tensor[TESSERA_O], q.batch, q.first + query, result.head);
  result.lse = offset_of(p.tensor[TESSERA_LSE], q.batch, result.head, q.first + query);
  return result;
}

// Returns what the row's O is multiplied by, from its reference in units of log2 and the sum of its
// weights; 0 where it has seen nothing or does not exist. Stores lse where `stores`.
__device__ inline float finish_row(const Params& p, const MlaRow& row, float reference, float sum,
                                   bool stores) {
  const View& sinks = p.tensor[TESSERA_SINK];
  float sink = p.flags & TESSERA_SINK_OFF_BY_ONE ? 0.f : -kInfinity;
  if (sinks.data && row.exists) {
    sink = load_float(sinks.data, offset_of(sinks, row.head), sinks.dtype);
  }
  const float sink2 = fminf(sink * kLog2e, FLT_MAX);  // 3e38 is infinite in these units
  const float largest = fmaxf(fmaxf(sum == 0 ? -kInfinity : reference, sink2), -FLT_MAX);
  const float factor = exp2_approx(reference - largest);  // 1 without a sink
  const float all = (sum == 0 ? 0 : sum * factor) + exp2_approx(sink2 - largest);
  const bool sees = row.exists && all != 0;
  const View& lse = p.tensor[TESSERA_LSE];
  if (stores && lse.data && row.owned) {
    float value = sees ? (largest + log2_approx(all)) * kLn2 : -kInfinity;
    if (row.exists && value < sink) value = sink;
    static_cast<float*>(lse.data)[row.lse] = value;
  }
  return sees && sum != 0 ? factor * reciprocal_approx(all) : 0.f;
}

}  // namespace tessera::cuda::sm90
