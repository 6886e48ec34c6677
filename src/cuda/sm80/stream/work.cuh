// SPDX-License-Identifier: Apache-2.0
// Who does what in a pass over the keys of few rows, counted on the device from live lengths: a
// grid of any size serves any lengths, so that graphs stay valid.
//
// A unit is a tile of rows of a sequence with the heads that share it; its keys are cut into cells:
// of one step each, or, where the cut may not depend on the rest of the batch, of a share of the
// sequence's own. All cells of all units stand in one row, by sequence, tile, heads, keys; each CTA
// takes an equal run of them. A piece is what a CTA has of one unit, or, in the second case, one
// cell; a unit of several pieces is summed by the CTA that brings the last.
//
// Nothing here but the search of a CTA's threads for its run needs a GPU: tests/cuda/work_test.cc
// deals out small problems on the host.
#pragma once

#include "cuda/common/sequence.cuh"
#include "cuda/sm80/stream/params.h"
#include "cuda/sm80/stream/tile.h"

namespace tessera::cuda::sm80 {

// Sums of cells and of units. Tables that no caller may give, whose sequences overlap, could name
// more than an int counts: sums end at kMostCells, where the units that the workspace has room
// for have ended.
struct Counted {
  int cells, units;

  __device__ Counted plus(const Counted& other) const {
    constexpr int kMost = kMostCells;
    return {min(cells + other.cells, kMost), min(units + other.units, kMost)};
  }
};

// The cells of a sequence.
struct CellsOf {
  int row0;                 // first row of its first tile
  int units;                // tiles x packs of heads
  int first_key;            // a multiple of a step
  int steps;                // of keys; at least 1, because rows that see nothing are written too
  int steps_a_cell, cells;  // of a unit

  __device__ CellsOf(const StreamArgs& args, const Sequence& sequence, int queries, int step_keys) {
    const Rows& q = sequence.q;
    row0 = (q.owned_lo - (q.owned_lo < 0 ? queries - 1 : 0)) / queries * queries;
    const int tiles = max(q.owned_hi - row0 + queries - 1, 0) / queries;
    units = tiles * (args.params.hq / args.pack);
    const Interval visible = sequence.band.keys(0, q.length);
    first_key = visible.empty() ? 0 : visible.lo / step_keys * step_keys;
    steps = visible.empty() ? 1 : (visible.hi - first_key + step_keys - 1) / step_keys;
    steps_a_cell = 1;
    if (args.chunks > 0) {
      steps_a_cell = max((steps + args.chunks - 1) / args.chunks, args.least_steps);
    }
    cells = (steps + steps_a_cell - 1) / steps_a_cell;
  }
  __device__ Counted all() const { return {units * cells, units}; }
};

// The sequence in which a run of cells begins, and what comes before it.
struct Start {
  int n;
  Counted before;
  int all, runs;         // of the whole problem: cells, and what they are cut into
  Counted of_warps[32];  // of the threads of each
};

// How many runs there are: one for each CTA, as long as each has two steps, which it reads at once,
// or a share.
__device__ inline int num_runs(const StreamArgs& args, int cells, int most) {
  return min(most, args.chunks > 0 || cells < 2 ? cells : cells / 2);
}

// Cells in runs of equal length, the first `longer` of one cell more.
struct Runs {
  int runs, cells, longer;

  __device__ Runs(int all, int runs) : runs(runs) {
    cells = runs > 0 ? all / runs : 0;
    longer = all - runs * cells;
  }
  __device__ int begin(int run) const { return run * cells + min(run, longer); }
  __device__ int of(int cell) const {
    const int in_longer = longer * (cells + 1);
    return cell < in_longer ? cell / (cells + 1) : longer + (cell - in_longer) / cells;
  }
};

struct Piece {
  int unit, pack, row0;
  int key_begin, key_end;
  int parts;  // pieces of the unit
  int slot;   // where this one's part goes
  int first_slot, first_run;
  bool chunked;

  __device__ int slot_of(int part) const {
    return chunked ? first_slot + part : 2 * (first_run + part) + (part == 0 ? 1 : 0);
  }
};

// Walks the pieces of one run.
class Walk {
 public:
  __device__ Walk(const StreamArgs& args, int queries, int step_keys, const Start& start, int run)
      : args_(args),
        queries_(queries),
        step_keys_(step_keys),
        runs_(start.all, start.runs),
        run_(run) {
    if (run >= runs_.runs) return;
    at_ = runs_.begin(run);
    end_ = runs_.begin(run + 1);
    n_ = start.n;
    before_ = start.before;
    resolve();
  }

  __device__ bool done() const { return at_ >= end_; }
  __device__ const Sequence& sequence() const { return sequence_; }

  __device__ Piece piece() const {
    const CellsOf cells(args_, sequence_, queries_, step_keys_);
    const int local = at_ - before_.cells, unit = local / cells.cells;
    const int cell = local - unit * cells.cells;
    const int packs = args_.params.hq / args_.pack;
    const int count = cells_of_piece(cells, cell);
    const int first = at_ - cell;  // cell of the unit
    Piece piece;
    piece.unit = before_.units + unit;
    piece.pack = unit % packs;
    piece.row0 = cells.row0 + unit / packs * queries_;
    const int steps_end = min((cell + count) * cells.steps_a_cell, cells.steps);
    piece.key_begin = cells.first_key + cell * cells.steps_a_cell * step_keys_;
    piece.key_end = cells.first_key + steps_end * step_keys_;
    piece.chunked = args_.chunks > 0;
    piece.first_slot = piece.unit * args_.chunks;
    piece.first_run = runs_.of(first);
    piece.parts =
        piece.chunked ? cells.cells : runs_.of(first + cells.cells - 1) - piece.first_run + 1;
    piece.slot = piece.slot_of(piece.chunked ? cell : run_ - piece.first_run);
    return piece;
  }

  __device__ void advance() {
    const CellsOf cells(args_, sequence_, queries_, step_keys_);
    at_ += cells_of_piece(cells, (at_ - before_.cells) % cells.cells);
    if (done() || at_ - before_.cells < cells.all().cells) return;
    before_ = before_.plus(cells.all());
    ++n_;
    resolve();
  }

 private:
  __device__ int cells_of_piece(const CellsOf& cells, int cell) const {
    return args_.chunks > 0 ? 1 : min(cells.cells - cell, end_ - at_);
  }

  // The sequence of cell at_, from n_ on. Tables that no caller may give could name more units than
  // the workspace has room for: the walk ends there.
  __device__ void resolve() {
    for (;; ++n_) {
      if (n_ >= args_.params.batch) break;
      sequence_ = sequence_of(args_.params, n_);
      const CellsOf cells(args_, sequence_, queries_, step_keys_);
      if (cells.units > args_.units - before_.units) break;
      if (cells.units > 0) return;
    }
    end_ = at_;
  }

  const StreamArgs& args_;
  const int queries_, step_keys_;
  const Runs runs_;
  const int run_;
  int at_ = 0, end_ = 0, n_ = 0;
  Counted before_{0, 0};
  Sequence sequence_;
};

// What sequences [lo, hi) have.
__device__ inline Counted count(const StreamArgs& args, int queries, int step_keys, int lo,
                                int hi) {
  Counted sum{0, 0};
  for (int n = lo; n < hi; ++n) {
    sum = sum.plus(CellsOf(args, sequence_of(args.params, n), queries, step_keys).all());
  }
  return sum;
}

// Sets n and before to the sequence of [lo, hi) that has the cell; before: what comes before lo.
__device__ inline void find_sequence(Start& start, const StreamArgs& args, int queries,
                                     int step_keys, int lo, int hi, Counted before, int cell) {
  int n = lo;
  for (; n < hi - 1; ++n) {
    const Counted to =
        before.plus(CellsOf(args, sequence_of(args.params, n), queries, step_keys).all());
    if (cell < to.cells) break;
    before = to;
  }
  start.n = n;
  start.before = before;
}

#ifdef __CUDACC__
// Where the run of this CTA begins, found by all of its threads together, each of which counts a
// run of sequences. Ends with a barrier.
__device__ inline void find_start(Start& start, const StreamArgs& args, int queries,
                                  int step_keys) {
  const int threads = blockDim.x, each = (args.params.batch + threads - 1) / threads;
  const int lo = min(static_cast<int>(threadIdx.x) * each, args.params.batch);
  const int hi = min(lo + each, args.params.batch);
  // Sums of the threads up to and with this one, then of those before it.
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Counted to = count(args, queries, step_keys, lo, hi);
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const Counted other{__shfl_up_sync(~0u, to.cells, distance),
                        __shfl_up_sync(~0u, to.units, distance)};
    if (lane >= distance) to = to.plus(other);
  }
  Counted before{__shfl_up_sync(~0u, to.cells, 1), __shfl_up_sync(~0u, to.units, 1)};
  if (lane == 0) before = {0, 0};
  if (lane == 31) start.of_warps[warp] = to;
  __syncthreads();
  Counted all{0, 0}, of_warps_before{0, 0};
  for (int w = 0; w < threads / 32; ++w) {
    if (w == warp) of_warps_before = all;
    all = all.plus(start.of_warps[w]);
  }
  before = before.plus(of_warps_before);
  to = to.plus(of_warps_before);
  const int runs = num_runs(args, all.cells, gridDim.x);
  const int cell = Runs(all.cells, runs).begin(blockIdx.x);
  if (threadIdx.x == 0) start.all = all.cells, start.runs = runs;
  if (before.cells <= cell && cell < to.cells) {
    find_sequence(start, args, queries, step_keys, lo, hi, before, cell);
  }
  __syncthreads();
}
#endif

#ifdef __CUDACC__
// Announces a piece of several to the others of its unit, by a warp that comes from a barrier of
// the CTA; true for one of them, which then sees what all of them have written.
//
// A part is announced by the launch's mark in the word of its slot: the workspace's content is
// unknown, and a word that is not the mark announces nothing. Each word is written by one CTA (a
// counter would have all of them queue up), and whoever is last to write sees all others'. If
// several see all, the first to take part 0's word back is the one. All words end as 0, because a
// graph launches again with the same mark.
__device__ inline bool brings_last(const StreamArgs& args, const Piece& piece) {
  const int lane = threadIdx.x % 32;
  const auto word = [&](int part) -> volatile unsigned long long& {
    return args.announced[piece.slot_of(part)];
  };
  if (lane == 0) {
    __threadfence();  // what the CTA has written comes before the word
    *const_cast<volatile unsigned long long*>(args.announced + piece.slot) = args.mark;
    __threadfence();  // the word before the looks: one of any two sees the other's
  }
  __syncwarp();
  bool all = true;
#pragma unroll 4
  for (int part = lane; part < piece.parts; part += 32) all &= word(part) == args.mark;
  if (!__all_sync(~0u, all)) return false;
  bool first = false;
  if (lane == 0) {
    first = atomicCAS(args.announced + piece.slot_of(0), args.mark, 0ull) == args.mark;
  }
  if (!__shfl_sync(~0u, first, 0)) return false;
  for (int part = 1 + lane; part < piece.parts; part += 32) word(part) = 0;
  __threadfence();
  return true;
}
#endif

}  // namespace tessera::cuda::sm80
