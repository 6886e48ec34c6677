// SPDX-License-Identifier: Apache-2.0
// Who does what in a pass over the keys of few rows, counted on the device from live lengths: a
// grid of any size serves any lengths, so that graphs stay valid.
//
// A unit is a tile of rows of a sequence with the heads that share it; its keys are cut into cells:
// of one step each, or, where the cut may not depend on the rest of the batch, of a share of the
// sequence's own. All cells of all units stand in one row, by sequence, tile, heads, keys, before
// each unit some that are empty and stand for what its beginning costs; each CTA takes an equal run
// of them. A piece is what a CTA has of one unit, or, in the second case, one cell; a unit of
// several pieces is summed by whoever knows that all are there.
//
// A kernel whose pieces are costly to sum asks for units that are cut on their own, if there are no
// more of them than CTAs: all runs have as many cells as the longest piece, a unit begins with a
// run, and no CTA has two units.
//
// All of this is the way to a CTA's first load, by code that has not run before: each thing is
// written once, and divided without dividing.
//
// A kernel whose heads lie beside each other in memory lets as many CTAs go side by side, each with a
// pack of heads of its own: what is said of a CTA here is then said of all of these, and a unit has
// the packs of all.
//
// Nothing here but the sum over a warp needs a GPU: tests/cuda/work_test.cc deals out small
// problems on the host.
#pragma once

#include "cuda/common/sequence.cuh"
#include "cuda/common/work/args.h"

namespace tessera::cuda {

// x / d of x below 2^30, where there are less than 2^20 of d in it.
__device__ inline int few_of(int d, int x) {
#ifdef __CUDA_ARCH__
  int quotient = static_cast<int>(__fdividef(static_cast<float>(x), static_cast<float>(d)));
  quotient -= quotient * d > x;  // off by one at most
  quotient += (quotient + 1) * d <= x;
  return quotient;
#else
  return x / d;
#endif
}

// A sequence of a problem without positions, which kernels of few rows have none of.
__device__ inline Sequence unplaced_sequence_of(const Params& p, int n) {
  const Rows q = rows_of<SideOfQueries>(p, n), k = rows_of<SideOfKeys>(p, n);
  return {n, q, k, Band::of(p, q.length, k.length)};
}

// Sums of cells and of units. Tables that no caller may give, whose sequences overlap, could name
// more than an int counts: sums end at kMostCells, where the units that the workspace has room
// for have ended.
struct Counted {
  int cells, units;

  __device__ Counted plus(const Counted& other) const {
    constexpr int kMost = kMostCells;
    return {min(cells + other.cells, kMost), min(units + other.units, kMost)};
  }
  // With `ends` empty cells before each unit.
  __device__ int in_row(int ends) const { return cells + ends * units; }
};

// Cells of a unit that is cut into pieces of `apart`.
__device__ __forceinline__ int padded_cells(int cells, int apart) {
  return apart <= 1 ? cells : few_of(apart, cells + apart - 1) * apart;
}
// Steps of a sequence whose rows see all of its keys.
__device__ __forceinline__ int steps_of_whole(int keys, int step_keys) {
  return max((keys + step_keys - 1) / step_keys, 1);
}

// The cells of a sequence.
struct CellsOf {
  int row0 = 0;       // first row of its first tile
  int units = 0;      // tiles x packs of heads
  int first_key = 0;  // a multiple of a step
  int steps = 0;      // of keys; at least 1, because rows that see nothing are written too
  int steps_a_cell = 1, cells = 0;  // of a unit

  __device__ CellsOf() {}
  __device__ CellsOf(const WorkArgs& args, const Sequence& sequence, int step_keys) {
    if (args.whole) {
      units = args.packs.divisor;
      cells = steps = steps_of_whole(sequence.k.length, step_keys);
      return;
    }
    const Rows& q = sequence.q;
    if (q.length > args.most_queries) return;
    const int before = q.owned_lo < 0
                           ? args.queries.quotient(-q.owned_lo + args.queries.divisor - 1)
                           : -args.queries.quotient(q.owned_lo);
    row0 = -before * args.queries.divisor;
    const int tiles = args.queries.quotient(max(q.owned_hi - row0 + args.queries.divisor - 1, 0));
    units = tiles * args.packs.divisor;
    const Interval visible = sequence.band.keys(0, q.length);
    first_key = visible.empty() ? 0 : visible.lo / step_keys * step_keys;
    steps = visible.empty() ? 1 : (visible.hi - first_key + step_keys - 1) / step_keys;
    steps_a_cell = 1;
    cells = steps;
    if (args.chunks > 0) {
      steps_a_cell = max((steps + args.chunks - 1) / args.chunks, args.least_steps);
      cells = (steps + steps_a_cell - 1) / steps_a_cell;
    }
  }
  // With each unit's cells rounded up to a multiple of `apart`.
  __device__ int padded(int apart) const { return padded_cells(cells, apart); }
  __device__ Counted all(int apart) const { return {units * padded(apart), units}; }
};

// The row of cells, cut into runs of equal length, the first `longer` of one cell more.
struct Runs {
  int ends;       // empty cells before each unit
  int apart = 1;  // cells of a piece of units that are cut on their own
  int runs, cells = 0, longer = 0;

  __device__ Runs() {}
  // all: of the whole problem; most: CTAs. A unit's beginning costs a CTA that has others about
  // three steps.
  __device__ Runs(const WorkArgs& args, const Counted& all, int most) {
    runs = min(most, all.cells);
    ends = 0;
    if (runs <= 0) return;
    if (args.chunks == 0) ends = min(few_of(8 * runs, all.cells), 3);
    const int in_row = all.in_row(ends);
    cells = few_of(runs, in_row);
    longer = in_row - runs * cells;
  }
  // The runs where each unit is cut on its own, in pieces of `apart` cells.
  __device__ static Runs cut_apart(int apart, const Counted& all) {
    Runs result;
    result.ends = 0, result.apart = result.cells = apart;
    result.runs = all.cells / apart;
    return result;
  }
  __device__ int begin(int run) const { return run * cells + min(run, longer); }
  __device__ int of(int cell) const {
    const int in_longer = longer * (cells + 1);
    const bool is_longer = cell < in_longer;
    return (is_longer ? 0 : longer) +
           few_of(is_longer ? cells + 1 : cells, is_longer ? cell : cell - in_longer);
  }
};

// The sequence from which on a run's cells lie, and what comes before it.
struct Start {
  int n;
  Counted before;
};

struct Piece {
  int unit, pack, row0;
  int key_begin, key_end;
  int parts;  // pieces of the unit
  // Where parts go: part 0, which ends a run that may have begun with another unit's, apart from the
  // others, which follow each other.
  int first_slot, next_slots;
  int part;           // which this one is
  int slot_step = 1;  // from part to part

  __device__ int slot_of(int part) const {
    return part == 0 ? first_slot : next_slots + part * slot_step;
  }
  // The piece of CTA `which` of `all` that go side by side, if this is the piece of all.
  __device__ Piece of_beside(int all, int which) const {
    Piece own = *this;
    own.unit = unit * all + which;
    own.pack = pack * all + which;
    own.first_slot = first_slot * all + which;
    own.next_slots = next_slots * all + which;
    own.slot_step = all;
    return own;
  }
};

// A sequence with its cells.
struct KnownSequence {
  Sequence sequence;
  CellsOf cells;

  __device__ KnownSequence() {}
  __device__ KnownSequence(const WorkArgs& args, int n, int step_keys)
      : sequence(unplaced_sequence_of(args.params, n)), cells(args, sequence, step_keys) {}
};

// Walks the pieces of one run: for (Walk walk(...); walk.next();) ... walk.piece() ...
class Walk {
 public:
  __device__ Walk(const WorkArgs& args, int step_keys, const Runs& runs, const Start& start,
                  int run)
      : args_(args),
        step_keys_(step_keys),
        runs_(runs),
        run_(run),
        n_(start.n),
        before_(start.before) {
    if (run >= runs.runs) return;
    at_ = runs.begin(run);
    end_ = runs.begin(run + 1);
  }

  // The same where the sequence in which the run begins is known.
  __device__ Walk(const WorkArgs& args, int step_keys, const Runs& runs, const Start& start,
                  int run, const KnownSequence& first, bool is_known)
      : Walk(args, step_keys, runs, start, run) {
    sequence_ = first.sequence;
    cells_ = first.cells;
    is_known_ = is_known;
  }

  // Goes on to the next piece, the first at first. False: there is none, however often one asks.
  __device__ bool next() {
    at_ += taken_;
    if (!goes_on()) return false;
    const int all = cells_.padded(runs_.apart) + runs_.ends,
              local = at_ - before_.in_row(runs_.ends);
    unit_ = local / all;
    cell_ = local - unit_ * all - runs_.ends;
    if (cell_ < 0) {  // among the empty ones: the unit begins behind them
      at_ -= cell_;
      cell_ = 0;
    }
    taken_ = args_.chunks > 0 ? 1 : max(min(cells_.cells - cell_, end_ - at_), 0);
    return taken_ > 0;
  }
  __device__ const Sequence& sequence() const { return sequence_; }

  __device__ Piece piece() const {
    const int tile = args_.packs.quotient(unit_);
    Piece piece;
    piece.unit = before_.units + unit_;
    piece.pack = unit_ - tile * args_.packs.divisor;
    piece.row0 = cells_.row0 + tile * args_.queries.divisor;
    const int steps_end = min((cell_ + taken_) * cells_.steps_a_cell, cells_.steps);
    piece.key_begin = cells_.first_key + cell_ * cells_.steps_a_cell * step_keys_;
    piece.key_end = cells_.first_key + steps_end * step_keys_;
    if (args_.chunks > 0) {
      piece.parts = cells_.cells, piece.part = cell_;
      piece.first_slot = piece.next_slots = piece.unit * args_.chunks;
      return piece;
    }
    const int first = at_ - cell_;  // cell of the unit
    const int first_run = runs_.of(first);
    piece.parts = runs_.of(first + cells_.cells - 1) - first_run + 1;
    piece.part = run_ - first_run;
    piece.first_slot = args_.most_runs + first_run, piece.next_slots = first_run;
    return piece;
  }

 private:
  // Finds the sequence of cell at_, from n_ on. Tables that no caller may give could name more
  // units than the workspace has room for: the walk ends there.
  __device__ bool goes_on() {
    if (at_ >= end_) return false;
    for (;; is_known_ = false, ++n_, before_ = before_.plus(cells_.all(runs_.apart))) {
      if (!is_known_) {
        if (n_ >= args_.params.batch) return false;
        sequence_ = unplaced_sequence_of(args_.params, n_);
        cells_ = CellsOf(args_, sequence_, step_keys_);
        is_known_ = true;
      }
      if (cells_.units > args_.units - before_.units) return false;
      if (at_ < before_.plus(cells_.all(runs_.apart)).in_row(runs_.ends)) return true;
    }
  }

  const WorkArgs& args_;
  const int step_keys_;
  const Runs runs_;
  const int run_;
  int at_ = 0, end_ = 0, n_;
  int unit_ = 0, cell_ = 0, taken_ = 0;
  bool is_known_ = false;
  Counted before_;
  Sequence sequence_;
  CellsOf cells_;
};

// What sequences [lo, hi) have, with cells of units rounded up to a multiple of `apart`.
__device__ inline Counted count(const WorkArgs& args, int step_keys, int lo, int hi, int apart) {
  Counted sum{0, 0};
#ifdef __CUDACC__
#pragma unroll 1
#endif
  for (int n = lo; n < hi; ++n) {
    sum = sum.plus(CellsOf(args, unplaced_sequence_of(args.params, n), step_keys).all(apart));
  }
  return sum;
}

// The least number of cells by which all units can be cut on their own for so many CTAs, if they
// then take no more than a sixth longer than with equal runs; else 0. pieces_of(n): how many pieces
// units have in cells of n.
template <typename PiecesOf>
__device__ int cells_apart(const WorkArgs& args, const Counted& all, int most,
                           const PiecesOf& pieces_of) {
  if (args.least_apart == 0 || args.chunks > 0 || all.units > most || all.units == 0) return 0;
  const int even = max((all.cells + most - 1) / most, args.least_apart);
#ifdef __CUDACC__
#pragma unroll 1
#endif
  for (int cells = even; (cells - even) * 6 <= even; cells += max(even / 32, 1)) {
    if (pieces_of(cells) <= most) return cells;
  }
  return 0;
}

#ifdef __CUDACC__
// Counts all sequences and finds where a run of at most `most` begins: each warp for itself, whose
// lanes count some each. Up to 32 sequences have a lane each, which resolves its own once.
struct Found {
  Runs runs;
  Start start;
  int units;            // of all sequences
  KnownSequence first;  // in which the run begins, if it is known
  bool knows_first;

  __device__ Walk walk(const WorkArgs& args, int step_keys, int run) const {
    return Walk(args, step_keys, runs, start, run, first, knows_first);
  }
};
__device__ __forceinline__ Counted sum_up_to_lane(Counted own) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const Counted other{__shfl_up_sync(~0u, own.cells, distance),
                        __shfl_up_sync(~0u, own.units, distance)};
    if (lane >= distance) own = own.plus(other);
  }
  return own;
}
template <typename T>
__device__ __forceinline__ T of_lane(const T& of, int lane) {
  static_assert(sizeof(T) % sizeof(int) == 0);
  T result;
  const int* const from = reinterpret_cast<const int*>(&of);
  int* const to = reinterpret_cast<int*>(&result);
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T) / sizeof(int)); ++i) {
    to[i] = __shfl_sync(~0u, from[i], lane);
  }
  return result;
}
// Sequences whose cells a lane keeps at once.
constexpr int kWholeOfLane = 4;

// cells[i]: of the lane's i-th sequence, 0 where it has no such.
template <typename LengthAt>
__device__ __forceinline__ void find_cells_of_whole(const WorkArgs& args, int step_keys, int first,
                                                    int each, const LengthAt& length_at,
                                                    int (&cells)[kWholeOfLane]) {
#pragma unroll
  for (int i = 0; i < kWholeOfLane; ++i) {
    const int n = first + i;
    const bool exists = i < each && n < args.params.batch;
    cells[i] = exists ? steps_of_whole(clamped(length_at(n), 0, args.params.sk), step_keys) : 0;
  }
}

// find_start() of sequences that are whole. A lane keeps the cells of its own in registers, so that
// their lengths are read once and all together.
__device__ __forceinline__ Found find_start_of_whole(const WorkArgs& args, int step_keys, int run,
                                                     int most) {
  const Params& p = args.params;
  const int lane = threadIdx.x % 32, each = (p.batch + 31) / 32, units = args.packs.divisor;
  const View& lengths = p.tensor[TESSERA_SEQLENS_K];
  const int64_t stride = lengths.stride[0];
  int cells[kWholeOfLane];
  const auto find_cells = [&](const auto& length_at) {
    find_cells_of_whole(args, step_keys, lane * each, each, length_at, cells);
  };
  if (!lengths.data) {
    find_cells([&](int) { return p.sk; });
  } else if (lengths.dtype == TESSERA_INT32) {
    find_cells([&](int n) { return static_cast<const int32_t*>(lengths.data)[n * stride]; });
  } else {
    find_cells([&](int n) { return static_cast<const int64_t*>(lengths.data)[n * stride]; });
  }
  const auto of_lane_units = [&](const auto& count) {
    int sum = 0;
#pragma unroll
    for (int i = 0; i < kWholeOfLane; ++i) {
      if (i < each) sum += count(cells[i]);
    }
    return units * sum;
  };
  const auto itself = [](int of) { return of; };
  int own = of_lane_units(itself);
  const Counted all{static_cast<int>(__reduce_add_sync(~0u, own)), units * p.batch};
  Runs runs(args, all, most);
  const int apart = cells_apart(args, all, most, [&](int piece) {
    const auto pieces = [&](int of) { return of == 0 ? 0 : few_of(piece, of + piece - 1); };
    return __reduce_add_sync(~0u, of_lane_units(pieces));
  });
  if (apart > 0) {
#pragma unroll
    for (int& of : cells) of = of == 0 ? 0 : padded_cells(of, apart);
    own = of_lane_units(itself);
    const auto padded = static_cast<int>(__reduce_add_sync(~0u, own));
    runs = Runs::cut_apart(apart, {padded, all.units});
  }
  const int sequences = clamped(p.batch - lane * each, 0, each), at = runs.begin(run);
  const Counted to = sum_up_to_lane({own, units * sequences});
  // The lane behind whose sequences the run's first cell lies; then which of the next lane's has it.
  const int lanes = __popc(__ballot_sync(~0u, to.in_row(runs.ends) <= at));
  Counted before = of_lane(to, max(lanes, 1) - 1);
  if (lanes == 0) before = {0, 0};
  int n = lanes * each;
  bool lies_behind = true;
#pragma unroll
  for (int i = 0; i + 1 < kWholeOfLane; ++i) {
    if (i + 1 >= each) break;
    const int of = __shfl_sync(~0u, cells[i], min(lanes, 31));
    const Counted next = before.plus({units * of, units});
    lies_behind = lies_behind && next.in_row(runs.ends) <= at;
    if (lies_behind) before = next, ++n;
  }
  const KnownSequence first(args, min(n, p.batch - 1), step_keys);
  return {runs, {n, before}, all.units, first, n < p.batch};
}

__device__ __forceinline__ Found find_start(const WorkArgs& args, int step_keys, int run,
                                            int most) {
  // One sequence a lane is resolved as fast below, and then known.
  if (args.whole && args.params.batch > 32 && args.params.batch <= 32 * kWholeOfLane) {
    return find_start_of_whole(args, step_keys, run, most);
  }
  const int lane = threadIdx.x % 32, each = (args.params.batch + 31) / 32;
  const int lo = min(lane * each, args.params.batch), hi = min(lo + each, args.params.batch);
  const bool alone = each == 1;
  KnownSequence own;
  if (alone) own = KnownSequence(args, min(lane, args.params.batch - 1), step_keys);
  const auto count_of_lane = [&](int apart) {
    if (!alone) return count(args, step_keys, lo, hi, apart);
    return lo < hi ? own.cells.all(apart) : Counted{0, 0};
  };
  Counted to = sum_up_to_lane(count_of_lane(1));
  Counted all = of_lane(to, 31);
  Runs runs(args, all, most);
  const int apart = cells_apart(args, all, most, [&](int cells) {
    return __reduce_add_sync(~0u, count_of_lane(cells).cells / cells);
  });
  if (apart > 0) {
    to = sum_up_to_lane(count_of_lane(apart));
    all = of_lane(to, 31);
    runs = Runs::cut_apart(apart, all);
  }
  // The lane behind whose sequences the run's first cell lies, and the next lane's begin.
  const unsigned behind = __ballot_sync(~0u, to.in_row(runs.ends) <= runs.begin(run));
  const int lanes = __popc(behind);
  const Counted before = of_lane(to, max(lanes, 1) - 1);
  const Start start{lanes * each, lanes > 0 ? before : Counted{0, 0}};
  return {runs, start, all.units, of_lane(own, min(lanes, 31)), alone && lanes < 32};
}
#endif

}  // namespace tessera::cuda
