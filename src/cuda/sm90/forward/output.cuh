// SPDX-License-Identifier: Apache-2.0
// Rows of o, lse and max_logit: how a finished row reaches memory.
#pragma once

#include <cfloat>
#include <type_traits>

#include "cuda/common/element.cuh"
#include "cuda/sm90/forward/schedule.cuh"
#include "cuda/sm90/machine/fragment.cuh"
#include "cuda/sm90/machine/ptx.cuh"
#include "cuda/sm90/score/scale.cuh"

namespace tessera::cuda::sm90 {

__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Element: of o; float where its parts are merged later.
template <typename Element>
struct Output {
  static constexpr bool kIsPart = std::is_same_v<Element, float>;
  const Params& p;
  const Work& work;
  const int head = 0;  // of the tile's

  // Loads what a tile's rows need of its head. Called by the scheduler, ahead of time.
  static __device__ __forceinline__ void prepare(const Params& p, Work& work) {
    const int row = work.q.first + work.m0;
    work.o = offset_of(p.tensor[TESSERA_O], work.q.batch, row, work.head);
    work.lse = offset_of(p.tensor[TESSERA_LSE], work.q.batch, work.head, row);
    const View& sinks = p.tensor[TESSERA_SINK];
    work.sink = p.flags & TESSERA_SINK_OFF_BY_ONE ? 0.f : -kInfinity;
    if (sinks.data) {
      work.sink = load_float(sinks.data, offset_of(sinks, work.head), sinks.dtype);
    }
  }

  __device__ __forceinline__ Element* row_of_o(int row_of_tile) const {
    const View& o = p.tensor[TESSERA_O];
    return static_cast<Element*>(o.data) +
           (work.o + row_of_tile * o.stride[1] + head * o.stride[2]);
  }

  __device__ __forceinline__ float* row_of_lse(int row_of_tile) const {
    const View& lse = p.tensor[TESSERA_LSE];
    return static_cast<float*>(lse.data) +
           (work.lse + row_of_tile * lse.stride[2] + head * lse.stride[1]);
  }

  // The tile's first head has its sink in `work`. Of the parts of a row one has it.
  __device__ __forceinline__ float sink() const {
    const View& sinks = p.tensor[TESSERA_SINK];
    if (head == 0 || !sinks.data || (kIsPart && work.part > 0)) return work.sink;
    return load_float(sinks.data, offset_of(sinks, work.head + head), sinks.dtype);
  }

  // The sink in units of log2, which do not hold 3e38.
  __device__ __forceinline__ float sink2() const { return fminf(sink() * kLog2e, FLT_MAX); }

  // Returns what o is multiplied by, and leaves the lse in place of l, from m (log2 units) and l of
  // a row and sink2(). A row that sees nothing, not even a sink, has o = 0 and lse = -inf; so has
  // one that does not exist, whatever it has seen. It has no branches: consumers have latency to
  // hide.
  __device__ __forceinline__ float finish_row(bool exists, float sink2, float m, float& l) const {
    const float largest = fmaxf(fmaxf(m, sink2), -FLT_MAX);  // finite, for the differences
    const float factor = exp2_approx(m - largest);           // 1 without a sink
    l = l * factor + exp2_approx(sink2 - largest);
    const bool sees = exists && l != 0.f;
    const float inverse = sees ? factor * reciprocal_approx(l) : 0.f;
    l = sees ? (largest + log2_approx(l)) * kLn2 : -kInfinity;
    return inverse * p.dropout_scale;
  }

  // The lse that finish_row() left is no less than the sink, of which sink2() may say too little.
  // The sink is read again here: until now it would take a register. NaN stays NaN.
  __device__ __forceinline__ float lse_to_store(bool exists, float lse) const {
    const float sink = head == 0 ? *const_cast<const volatile float*>(&work.sink) : this->sink();
    return exists && lse < sink ? sink : lse;
  }

  // What is left to be done for the two rows of a thread when O arrives.
  struct Rows {
    Element* o;       // where the thread's first columns go
    int columns[2];   // from there to the end; none where the row is not stored
    float factor[2];  // 1 / l

    __device__ __forceinline__ void scale_by(float x) { factor[0] *= x, factor[1] *= x; }
  };

  // The two rows of a thread are `row_of_tile` and 8 below; m and l are not yet summed over the
  // quad. Stores lse.
  __device__ __forceinline__ Rows finish(int row_of_tile, int lane, float c, const float (&m)[2],
                                         const float (&l)[2]) const {
    const int quad = lane % 4;
    const bool odd = quad % 2;
    const int4 ranges = *reinterpret_cast<const int4*>(&work.exists_lo);
    const float sink = sink2();
    bool exists[2], owned[2];
    float sum[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = row_of_tile + 8 * r;
      exists[r] = ranges.x <= row && row < ranges.y;
      owned[r] = ranges.z <= row && row < ranges.w;
      sum[r] = l[r] + __shfl_xor_sync(kAllLanes, l[r], 1);
    }
    if (p.tensor[TESSERA_MAX_LOGIT].data) {
      float largest = fmaxf(exists[0] ? m[0] : -kInfinity, exists[1] ? m[1] : -kInfinity);
      for (int bit = 1; bit < kWarp; bit *= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, bit));
      }
      if (lane == 0) raise_max_logit(largest * (c * kLn2));
    }
    Rows rows;
    const View& lse = p.tensor[TESSERA_LSE];
    float* const lse_of_rows = row_of_lse(row_of_tile);
    const bool stores_lse = lse.data && quad == 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] += __shfl_xor_sync(kAllLanes, sum[r], 2);
      rows.factor[r] = finish_row(exists[r], sink, m[r] * c, sum[r]);
      rows.columns[r] = owned[r] ? p.dv - (!kIsPart && odd ? 8 : 0) : 0;
      if (stores_lse && owned[r]) {
        lse_of_rows[8 * r * lse.stride[2]] = lse_to_store(exists[r], sum[r]);
      }
    }
    rows.o = row_of_o(row_of_tile) + (kIsPart ? 2 * quad : first_traded_column(lane));
    return rows;
  }

  // o = O / l from the accumulators of the rows' warp (machine/wgmma.cuh).
  template <int kElements>
  __device__ __forceinline__ void store(const Rows& rows, int lane, float (&O)[kElements]) const {
    Element* const o[2] = {rows.o, rows.o + 8 * p.tensor[TESSERA_O].stride[1]};
    keep_rows(rows.factor[0] != 0, rows.factor[1] != 0, O);
    const auto stores = [&](int r, int column) { return column < rows.columns[r]; };
    if constexpr (kIsPart) {
      store_pairs(o, rows.factor, O, stores);
    } else {
      store_traded(o, rows.factor, lane, O, stores);
    }
  }

  // The same into a consumer's Tile in shared memory, where TMA may read it when all its threads
  // have said that they are done.
  template <typename Tile, int kElements>
  static __device__ __forceinline__ void stage(uint32_t tile, const float (&factor)[2], int thread,
                                               float (&O)[kElements]) {
    keep_rows(factor[0] != 0, factor[1] != 0, O);
    stage_rows<Element, Tile>(tile, thread / kWarp * 16, thread % kWarp, factor, O);
  }

  // The rows of a tile that sees no key, by one warp: zeros and the sink's lse; also the rows that
  // belong to no sequence but lie in the tensor.
  __device__ __forceinline__ void store_nothing(int rows, int lane) const {
    constexpr int kColumns = 16 / sizeof(Element);  // of one store
    const int end = min(work.q.owned_hi - work.m0, rows);
    for (int i = max(work.q.owned_lo - work.m0, 0); i < end; ++i) {
      if (lane == 0 && p.tensor[TESSERA_LSE].data) {
        float lse = 0;
        const bool exists = work.exists(work.m0 + i);
        finish_row(exists, sink2(), -kInfinity, lse);
        *row_of_lse(i) = lse_to_store(exists, lse);
      }
      Element* o = row_of_o(i);
      for (int column = kColumns * lane; column < p.dv; column += kColumns * kWarp) {
        *reinterpret_cast<uint4*>(o + column) = uint4{0, 0, 0, 0};
      }
    }
  }

  // The largest of all rows. Floats compare as integers, in reverse order when negative; the array
  // was filled with -inf.
  __device__ __forceinline__ void raise_max_logit(float value) const {
    const View& view = p.tensor[TESSERA_MAX_LOGIT];
    float* at = static_cast<float*>(view.data) + offset_of(view, work.head + head);
    if (__float_as_int(value) >= 0) {
      atomicMax(reinterpret_cast<int*>(at), __float_as_int(value));
    } else {
      atomicMin(reinterpret_cast<unsigned*>(at), __float_as_uint(value));
    }
  }
};

}  // namespace tessera::cuda::sm90
