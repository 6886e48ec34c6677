// SPDX-License-Identifier: Apache-2.0
// One sequence of the batch, resolved from lengths on the device: what core/mask/sequence.h is on
// the host. Lengths and offsets are clamped to the tensors' extents, those of a dense bias or mask
// among them: wrong values give wrong results, never an access outside.
#pragma once

#include <climits>

#include "cuda/common/params.h"

namespace tessera::cuda {

// The rows of memory that hold one side of a sequence. Rows are counted from the sequence's row 0,
// so that what lies before the first sequence of a packed buffer has negative numbers.
struct Rows {
  int batch;               // index on the batch axis of the side's tensors; 0 when packed
  int first;               // row of the tensor where row 0 is stored; 0 unless packed
  int length;              // rows of the sequence
  int owned_lo, owned_hi;  // rows to be written: its own, then padding, gap or tail
};

struct Sequence {
  int n;  // index in the batch
  Rows q, k;
  Band band;
};

// The tensors that describe a side.
struct SideOfQueries {
  static constexpr int kSeqlens = TESSERA_SEQLENS_Q, kCuSeqlens = TESSERA_CU_SEQLENS_Q,
                       kPadded = TESSERA_CU_SEQLENS_Q_PADDED, kSegmentIds = TESSERA_SEGMENT_IDS_Q;
  __device__ static bool packed(const Params& p) { return p.thd_q; }
  __device__ static int extent(const Params& p) { return p.sq; }
  __device__ static int longest(const Params& p) { return p.longest_q; }
  __device__ static const View& start(const Params& p) { return p.positions.q_start; }
};
struct SideOfKeys {
  static constexpr int kSeqlens = TESSERA_SEQLENS_K, kCuSeqlens = TESSERA_CU_SEQLENS_K,
                       kPadded = TESSERA_CU_SEQLENS_K_PADDED, kSegmentIds = TESSERA_SEGMENT_IDS_K;
  __device__ static bool packed(const Params& p) { return p.thd_k; }
  __device__ static int extent(const Params& p) { return p.sk; }
  __device__ static int longest(const Params& p) { return p.longest_k; }
  __device__ static const View& start(const Params& p) { return p.positions.k_start; }
};

__device__ inline int64_t integer_at(const View& view, int64_t i) {
  const int64_t at = i * view.stride[0];
  return view.dtype == TESSERA_INT32 ? static_cast<const int32_t*>(view.data)[at]
                                     : static_cast<const int64_t*>(view.data)[at];
}

__device__ inline int clamped(int64_t value, int lo, int hi) {
  return value < lo ? lo : value > hi ? hi : static_cast<int>(value);
}

// Row of the packed buffer where sequence n is stored; the extent past the last sequence.
template <typename Side>
__device__ int packed_start(const Params& p, int n) {
  if (n >= p.batch) return Side::extent(p);
  const View& padded = p.tensor[Side::kPadded];
  return clamped(integer_at(padded.data ? padded : p.tensor[Side::kCuSeqlens], n), 0,
                 Side::extent(p));
}

// A packed problem of no sequences has cu_seqlens of one element: one sequence of length 0.
template <typename Side>
__device__ int length_of(const Params& p, int n) {
  const View& cu = p.tensor[Side::kCuSeqlens];
  const View& seqlens = p.tensor[Side::kSeqlens];
  const int extent = Side::extent(p);
  if (Side::packed(p)) {
    if (cu.stride[0] == 0) return 0;
    const int left = extent - packed_start<Side>(p, n), longest = Side::longest(p);
    return clamped(integer_at(cu, n + 1) - integer_at(cu, n), 0, left < longest ? left : longest);
  }
  return seqlens.data ? clamped(integer_at(seqlens, n), 0, extent) : extent;
}

template <typename Side>
__device__ Rows rows_of(const Params& p, int n) {
  Rows rows{n, 0, length_of<Side>(p, n), 0, Side::extent(p)};
  if (!Side::packed(p)) return rows;
  rows.batch = 0;
  rows.first = packed_start<Side>(p, n);
  rows.owned_lo = n == 0 ? -rows.first : 0;
  rows.owned_hi = packed_start<Side>(p, n + 1) - rows.first;
  return rows;
}

// ---- positions: where a sequence of a call stands in a whole one ----

// Element n of an array of positions, 0 where there is none; what is out of range is brought into
// it, so that sums of three are no overflow.
__device__ inline int64_t position_at(const View& view, int n) {
  constexpr int64_t kMost = int64_t{1} << 60;
  if (!view.data) return 0;
  const int64_t value = integer_at(view, n);
  return value < -kMost ? -kMost : value > kMost ? kMost : value;
}

// A side of the window of sequence n: 0 left, 1 right; -1: no bound.
__device__ inline int64_t side_at(const View& windows, int n, int side) {
  constexpr int64_t kMost = int64_t{1} << 60;
  const int64_t at = n * windows.stride[0] + side * windows.stride[1];
  const int64_t value = windows.dtype == TESSERA_INT32
                            ? static_cast<const int32_t*>(windows.data)[at]
                            : static_cast<const int64_t*>(windows.data)[at];
  return value < -1 ? -1 : value > kMost ? kMost : value;
}

// The band of a sequence whose diagonal is found in 64 bits.
__device__ inline Band band_at_positions(const Params& p, int n, int len_q, int len_k) {
  const Positions& at = p.positions;
  const int64_t further =
      position_at(at.shift, n) + position_at(at.q_start, n) - position_at(at.k_start, n);
  if (!at.windows.data) return narrowed(BasicBand<int64_t>::of(at.rule, len_q, len_k, further));
  const BasicBandRule<int64_t> own{.bottom_right = at.rule.bottom_right,
                                   .window = {side_at(at.windows, n, 0), side_at(at.windows, n, 1)},
                                   .shift = at.rule.shift};
  return narrowed(BasicBand<int64_t>::of(own, len_q, len_k, further));
}
__device__ __forceinline__ Band band_of(const Params& p, int n, int len_q, int len_k) {
  return p.has_positions ? band_at_positions(p, n, len_q, len_k) : Band::of(p, len_q, len_k);
}

__device__ inline Sequence sequence_of(const Params& p, int n) {
  const Rows q = rows_of<SideOfQueries>(p, n), k = rows_of<SideOfKeys>(p, n);
  return {n, q, k, band_of(p, n, q.length, k.length)};
}

// The row or key of a dense bias or mask that row or key 0 of a sequence of this length stands for:
// those of a packed side are indexed by position.
template <typename Side>
__device__ __forceinline__ int dense_start(const Params& p, int n, int length) {
  if (!p.has_positions || !Side::packed(p)) return 0;
  const int most = Side::longest(p) - length;
  return clamped(position_at(Side::start(p), n), 0, most < 0 ? 0 : most);
}

// The position of key 0 in key ranges, and what a position in them means to the sequence.
__device__ __forceinline__ int range_start(const Params& p, int n) {
  return p.has_positions ? clamped(position_at(p.positions.k_start, n), 0, INT_MAX) : 0;
}
__device__ __forceinline__ int key_of_position(int position, int start) {
  return (position < 0 ? 0 : position) - start;
}

#ifdef __CUDACC__
// True if some sequence of a packed side reaches beyond the start of the next one: tables that a
// caller must not give, with which some tiles of keys may be missing. Called by all threads of a
// CTA.
template <typename Side>
__device__ bool side_overlaps(const Params& p) {
  bool found = false;
  for (int n = threadIdx.x; Side::packed(p) && n < p.batch; n += blockDim.x) {
    const Rows rows = rows_of<Side>(p, n);
    found |= rows.length > rows.owned_hi;
  }
  return __syncthreads_or(found);
}
__device__ inline bool sequences_overlap(const Params& p) {
  return side_overlaps<SideOfQueries>(p) || side_overlaps<SideOfKeys>(p);
}
#endif

// ---- tiles over a side ----
//
// A padded side has ceil(extent / tile) tiles a sequence. A packed side of unknown lengths gets
// extent / tile + batch + 1 slots, and sequence n those from start(n) / tile + n (+ 1 for n > 0):
// enough for its rows, the gap behind it and, for the first one, what is stored before it. Slots
// that are left over are empty. Nobody on the host needs to know a length.

struct TileOfRows {
  int n;      // sequence
  int begin;  // first row, a multiple of the tile; may lie past owned_hi (nothing to do)
};

// Tiles of a sequence come last row first: under a causal mask the longest work starts earliest.
template <typename Side>
__device__ TileOfRows tile_of_slot(const Params& p, int slot, int tile) {
  const int extent = Side::extent(p);
  if (!Side::packed(p)) {
    const int tiles = (extent + tile - 1) / tile;
    return {slot / tiles, (tiles - 1 - slot % tiles) * tile};
  }
  const auto first_slot = [&](int n) {
    return n == 0 ? 0 : packed_start<Side>(p, n) / tile + n + 1;
  };
  int lo = 0, hi = p.batch;  // first_slot(lo) <= slot < first_slot(hi)
  while (hi - lo > 1) {
    const int middle = (lo + hi) / 2;
    (first_slot(middle) <= slot ? lo : hi) = middle;
  }
  const int end =
      lo + 1 < p.batch ? first_slot(lo + 1) : num_tile_slots(true, extent, p.batch, tile);
  const int tiles_before = lo == 0 ? (packed_start<Side>(p, 0) + tile - 1) / tile : 0;
  return {lo, (end - 1 - slot - tiles_before) * tile};
}

}  // namespace tessera::cuda
