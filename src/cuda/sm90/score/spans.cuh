// SPDX-License-Identifier: Apache-2.0
// Segments as intervals. What a row sees of the other side is one interval, and costs what a band
// costs, if the positions of a segment stand side by side, as those of a document do. A warp finds
// out, from the hulls of blocks and the ids of the two blocks in which the segment begins and ends.
#pragma once

#include <climits>

#include "cuda/common/score/score.cuh"
#include "cuda/sm90/machine/ptx.cuh"

namespace tessera::cuda::sm90 {

// Lowest and highest of a warp.
__device__ __forceinline__ int lowest(int x) { return __reduce_min_sync(kAllLanes, x); }
__device__ __forceinline__ int highest(int x) { return __reduce_max_sync(kAllLanes, x); }

__device__ __forceinline__ Interval meet(Interval a, Interval b) {
  return {max(a.lo, b.lo), min(a.hi, b.hi)};
}

// Finds where the positions of segment `id` stand among those of one side, if they stand side by
// side.
//   hull_of(block)    int2: lowest and highest id in a block of kBlock positions
//   id_of(position)   of one that exists
template <int kBlock, typename HullOf, typename IdOf>
class SegmentFinder {
 public:
  // Positions below `length` in blocks [begin, end).
  __device__ __forceinline__ SegmentFinder(int begin, int end, int length, const HullOf& hull_of,
                                           const IdOf& id_of)
      : begin_(begin), end_(end), length_(length), hull_of_(hull_of), id_of_(id_of) {}

  // Called by all lanes of a warp, with the same id; false where they do not stand side by side.
  __device__ __forceinline__ bool find(int id, Interval& where) const {
    const int lane = threadIdx.x % kWarp;
    int first = INT_MAX, last = -1;  // of the blocks that may have it
    int blocks = 0, mixed = 0;       // how many there are, and how many may have others too
#pragma unroll 1
    for (int start = begin_; start < end_; start += kWarp) {
      const int2 hull = hull_of_(min(start + lane, end_ - 1));
      const bool has = start + lane < end_ && hull.x <= id && id <= hull.y;
      const uint32_t bits = __ballot_sync(kAllLanes, has);
      mixed += __popc(__ballot_sync(kAllLanes, has && hull.x != hull.y));
      if (!bits) continue;
      first = min(first, start + __ffs(bits) - 1);
      last = start + 31 - __clz(bits);
      blocks += __popc(bits);
    }
    where = {0, 0};
    if (blocks == 0) return true;
    if (blocks != last - first + 1 || mixed > 2) return false;
    const Interval in_first = run(id, first, lane);
    const Interval in_last = first == last ? in_first : run(id, last, lane);
    where = {in_first.lo, in_last.hi};
    // Those between the first and the last have no others.
    mixed -= !is_whole(in_first, first) + (first != last && !is_whole(in_last, last));
    return mixed <= 0 && in_first.lo >= 0 && in_last.lo >= 0 &&
           (first == last || (in_first.hi == (first + 1) * kBlock && in_last.lo == last * kBlock));
  }

 private:
  __device__ __forceinline__ bool is_whole(Interval run, int block) const {
    return run.hi - run.lo == min(kBlock, length_ - block * kBlock);
  }
  // The positions of `id` in a block; lo < 0 where others stand between them. None: empty.
  __device__ __forceinline__ Interval run(int id, int block, int lane) const {
    const int base = block * kBlock;
    int lo = INT_MAX, hi = base, count = 0, ids[kBlock / kWarp];
#pragma unroll
    for (int i = 0; i < kBlock / kWarp; ++i) {
      ids[i] = id_of_(min(base + i * kWarp + lane, length_ - 1));
    }
#pragma unroll
    for (int i = 0; i < kBlock / kWarp; ++i) {
      const int at = base + i * kWarp;
      const uint32_t bits = __ballot_sync(kAllLanes, at + lane < length_ && ids[i] == id);
      count += __popc(bits);
      if (bits) lo = min(lo, at + __ffs(bits) - 1), hi = at + kWarp - __clz(bits);
    }
    if (count == 0) return {base, base};
    return {count == hi - lo ? lo : -1, hi};
  }

  int begin_, end_, length_;
  const HullOf& hull_of_;
  const IdOf& id_of_;
};

// narrow(i, where) for each row i of a lane's kRows, with the positions of the row's segment: a
// warp looks them up together. False where a segment is no interval, or the rows have many.
template <int kRows, typename Finder, typename Narrow>
__device__ __forceinline__ bool find_segments_of_rows(const Finder& finder, const int (&ids)[kRows],
                                                      const Narrow& narrow) {
  constexpr int kMostIds = 8;
  int low = ids[0], high = ids[0];
#pragma unroll
  for (int i = 1; i < kRows; ++i) low = min(low, ids[i]), high = max(high, ids[i]);
  int id = lowest(low);
  const int last = highest(high);
#pragma unroll 1
  for (int n = 0; n < kMostIds; ++n) {
    Interval where;
    if (!finder.find(id, where)) return false;
    int next = last;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (ids[i] == id) narrow(i, where);
      if (ids[i] > id) next = min(next, ids[i]);
    }
    if (id == last) return true;
    id = lowest(next);
  }
  return false;
}

}  // namespace tessera::cuda::sm90
