// SPDX-License-Identifier: Apache-2.0
// How the decode kernels' work is dealt out (common/work/work.cuh), on the host: random small
// batches, every size of grid, every CTA one after the other. Needs no GPU.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <tuple>
#include <vector>

using std::max;
using std::min;  // as in device code

#include "cuda/common/work/work.cuh"

namespace tessera::cuda {
namespace {

constexpr int kStepKeys = 4;

// A batch with its lengths, and what the host makes of its shapes.
struct Batch {
  WorkArgs args{};
  std::vector<int32_t> q, k;  // cu_seqlens or lengths
  int queries;                // of a tile
  int most_runs = 0;
  int beside = 1;  // CTAs that take the same keys of a pack of heads each

  int sequences() const { return args.params.batch; }
  int packs() const { return args.params.hq / args.pack; }

  void point() {
    Params& p = args.params;
    const auto give = [&](int index, std::vector<int32_t>& from) {
      p.tensor[index] = {from.data(), {1, 0, 0, 0}, TESSERA_INT32, 4};
    };
    give(p.thd_q ? TESSERA_CU_SEQLENS_Q : TESSERA_SEQLENS_Q, q);
    give(p.thd_k ? TESSERA_CU_SEQLENS_K : TESSERA_SEQLENS_K, k);
    const int slots = num_tile_slots(p.thd_q, p.sq, p.batch, queries);
    args.units = slots * packs() / beside;
    args.queries = Divisor::of(queries);
    args.beside = Divisor::of(beside);
    args.packs = Divisor::of(packs() / beside);
    args.packs_kv = Divisor::of(p.group / args.pack);
  }
  CellsOf cells(int n) const {
    return CellsOf(args, unplaced_sequence_of(args.params, n), kStepKeys);
  }
};

// Lengths of a side: [batch], or [batch + 1] with their sums; and the extent.
std::vector<int32_t> draw_lengths(std::mt19937& random, int batch, int most, bool packed,
                                  int32_t* extent) {
  const auto below = [&](int n) { return static_cast<int>(random() % n); };
  std::vector<int32_t> lengths;
  int at = packed ? below(4) : 0;  // what is stored before the first sequence
  if (packed) lengths.push_back(at);
  for (int n = 0; n < batch; ++n) {
    const int length = below(5) == 0 ? below(2) : below(most + 1);
    lengths.push_back(packed ? at += length : length);
  }
  *extent = packed ? at + below(4) : most;  // and behind the last
  return lengths;
}

Batch draw(std::mt19937& random) {
  const auto below = [&](int n) { return static_cast<int>(random() % n); };
  Batch batch;
  Params& p = batch.args.params;
  p.batch = 1 + below(7);
  p.thd_q = below(2), p.thd_k = below(2);
  p.hk = 1 + below(2);
  p.group = 1 + below(4);
  p.hq = p.hk * p.group;
  batch.args.pack = p.group % 2 == 0 ? 2 : 1;
  batch.queries = 1 + below(4);
  batch.q = draw_lengths(random, p.batch, 6, p.thd_q, &p.sq);
  batch.k = draw_lengths(random, p.batch, below(3) == 0 ? 200 : 40, p.thd_k, &p.sk);
  p.bottom_right = below(2);
  p.window.left = below(2) ? -1 : below(12);
  p.window.right = below(2) ? -1 : below(3);
  batch.point();
  return batch;
}

struct Found {
  Runs runs;
  Start start;
};

// What find_start does: `lanes` count sequences, and the run begins behind some of them.
Found find_start(const Batch& batch, int lanes, int run, int most_runs) {
  const int each = (batch.sequences() + lanes - 1) / lanes;
  std::vector<Counted> to;  // up to and with the lane
  const auto count_all = [&](int apart) {
    Counted all{0, 0};
    to.clear();
    for (int lane = 0; lane < lanes; ++lane) {
      const int lo = min(lane * each, batch.sequences()), hi = min(lo + each, batch.sequences());
      all = all.plus(count(batch.args, kStepKeys, lo, hi, apart));
      to.push_back(all);
    }
    return all;
  };
  Counted all = count_all(1);
  Runs runs(batch.args, all, most_runs);
  const int apart = cells_apart(batch.args, all, most_runs, [&](int cells) {
    return count(batch.args, kStepKeys, 0, batch.sequences(), cells).cells / cells;
  });
  if (apart > 0) {
    all = count_all(apart);
    runs = Runs::cut_apart(apart, all);
  }
  int behind = 0;
  while (behind < lanes && to[behind].in_row(runs.ends) <= runs.begin(run)) ++behind;
  return {runs, {behind * each, behind > 0 ? to[behind - 1] : Counted{0, 0}}};
}

struct Placed {
  Piece piece;
  int n, run;
};

std::vector<Placed> pieces_of(const Batch& batch, int threads, int most_runs) {
  std::vector<Placed> pieces;
  for (int run = 0; run < most_runs; ++run) {
    const Found found = find_start(batch, threads, run, most_runs);
    Walk walk(batch.args, kStepKeys, found.runs, found.start, run);
    while (walk.next()) {
      for (int which = 0; which < batch.beside; ++which) {
        const Piece piece = walk.piece().of_beside(batch.beside, which);
        pieces.push_back({piece, walk.sequence().n, run});
      }
    }
    EXPECT_FALSE(walk.next());
  }
  return pieces;
}

using Unit = std::tuple<int, int, int>;  // sequence, first row, pack

// The pieces of each unit, by keys.
std::map<Unit, std::vector<Placed>> by_unit(const std::vector<Placed>& pieces) {
  std::map<Unit, std::vector<Placed>> units;
  for (const Placed& placed : pieces) {
    units[{placed.n, placed.piece.row0, placed.piece.pack}].push_back(placed);
  }
  for (auto& [unit, of_unit] : units) {
    std::ranges::sort(of_unit, {}, [](const Placed& placed) { return placed.piece.key_begin; });
  }
  return units;
}

// Every row that is owned has a tile, once for each pack.
void expect_all_rows(const Batch& batch, const std::map<Unit, std::vector<Placed>>& units) {
  for (int n = 0; n < batch.sequences(); ++n) {
    const Rows rows = sequence_of(batch.args.params, n).q;
    for (int pack = 0; pack < batch.packs(); ++pack) {
      for (int row = rows.owned_lo; row < rows.owned_hi; ++row) {
        int tiles = 0;
        for (const auto& [unit, pieces] : units) {
          const auto [of, row0, of_pack] = unit;
          tiles += of == n && of_pack == pack && row0 <= row && row < row0 + batch.queries;
        }
        ASSERT_EQ(tiles, 1) << "sequence " << n << " row " << row << " pack " << pack;
      }
    }
  }
}

// The pieces of a unit follow each other over all that its sequence sees, each knows how many there
// are and where the others put their parts.
void expect_whole_units(const Batch& batch, const std::map<Unit, std::vector<Placed>>& units,
                        int slots) {
  std::set<int> numbers, taken;
  for (const auto& [unit, pieces] : units) {
    const Sequence sequence = sequence_of(batch.args.params, std::get<0>(unit));
    const Interval keys = sequence.band.keys(0, sequence.q.length);
    const int parts = static_cast<int>(pieces.size());
    ASSERT_TRUE(numbers.insert(pieces[0].piece.unit).second);
    ASSERT_LT(pieces[0].piece.unit, batch.args.units * batch.beside);
    if (!keys.empty()) {
      ASSERT_LE(pieces.front().piece.key_begin, keys.lo);
      ASSERT_GE(pieces.back().piece.key_end, keys.hi);
      ASSERT_LT(pieces.back().piece.key_begin, keys.hi);
    }
    for (int part = 0; part < parts; ++part) {
      const Piece& piece = pieces[part].piece;
      ASSERT_EQ(piece.unit, pieces[0].piece.unit);
      ASSERT_EQ(piece.parts, parts);
      ASSERT_LT(piece.key_begin, piece.key_end);
      ASSERT_EQ(piece.key_begin % kStepKeys, 0);
      if (part > 0) {
        ASSERT_EQ(piece.key_begin, pieces[part - 1].piece.key_end);
      }
      if (parts == 1) continue;
      ASSERT_EQ(piece.part, part);
      const int slot = piece.slot_of(part);
      ASSERT_TRUE(taken.insert(slot).second);
      ASSERT_GE(slot, 0);
      ASSERT_LT(slot, slots);
      for (const Placed& other : pieces) ASSERT_EQ(other.piece.slot_of(part), slot);
    }
  }
}

// Steps of keys of each CTA, and how many units it has beyond one.
struct Load {
  int steps = 0, others = -1;
};
std::vector<Load> loads_of_runs(const std::vector<Placed>& pieces, int most_runs) {
  std::vector<Load> loads(most_runs);
  for (const Placed& placed : pieces) {
    loads[placed.run].steps += (placed.piece.key_end - placed.piece.key_begin) / kStepKeys;
    ++loads[placed.run].others;
  }
  return loads;
}

TEST(Work, EqualShares) {
  std::mt19937 random(1);
  for (int problem = 0; problem < 150; ++problem) {
    Batch batch = draw(random);
    batch.point();
    int cells = 0;
    for (int n = 0; n < batch.sequences(); ++n) cells += batch.cells(n).all(1).cells;
    for (int most_runs = 1; most_runs <= 24; ++most_runs) {
      batch.args.most_runs = most_runs;
      const int threads = 1 + static_cast<int>(random() % 9);
      const std::vector<Placed> pieces = pieces_of(batch, threads, most_runs);
      const auto units = by_unit(pieces);
      expect_whole_units(batch, units, 2 * most_runs);
      if (most_runs % 8 == 1) expect_all_rows(batch, units);
      // A CTA with one unit more has fewer steps, and none has more than its run.
      const std::vector<Load> loads = loads_of_runs(pieces, most_runs);
      const Runs runs = find_start(batch, threads, 0, most_runs).runs;
      ASSERT_EQ(runs.runs, std::min(most_runs, cells));
      ASSERT_EQ(runs.ends, cells == 0 ? 0 : std::min(cells / (8 * runs.runs), 3));
      int all = 0;
      for (int run = 0; run < most_runs; ++run) {
        const Load& load = loads[run];
        all += load.steps;
        const int whole = run < runs.runs ? runs.begin(run + 1) - runs.begin(run) : 0;
        ASSERT_LE(load.steps + runs.ends * std::max(load.others, 0), whole);
        ASSERT_GE(load.steps + runs.ends * (load.others + 2), whole);  // at both ends
      }
      ASSERT_EQ(all, cells);
      if (HasFatalFailure()) FAIL() << "problem " << problem << ", " << most_runs << " CTAs";
    }
  }
}

// Units that are cut on their own: a CTA has one piece, and none is longer than need be by a sixth.
TEST(Work, UnitsCutApart) {
  std::mt19937 random(4);
  int apart = 0;
  for (int problem = 0; problem < 150; ++problem) {
    Batch batch = draw(random);
    batch.args.least_apart = 1 + static_cast<int>(random() % 3);
    batch.point();
    Counted all{0, 0};
    for (int n = 0; n < batch.sequences(); ++n) all = all.plus(batch.cells(n).all(1));
    for (int most_runs = 1; most_runs <= 48; most_runs += 1 + most_runs / 6) {
      batch.args.most_runs = most_runs;
      const std::vector<Placed> pieces = pieces_of(batch, 1 + problem % 9, most_runs);
      const auto units = by_unit(pieces);
      expect_whole_units(batch, units, 2 * most_runs);
      if (most_runs % 8 == 1) expect_all_rows(batch, units);
      const Runs runs = find_start(batch, 3, 0, most_runs).runs;
      if (runs.apart > 1) {
        ++apart;
        const int even = max((all.cells + most_runs - 1) / most_runs, batch.args.least_apart);
        ASSERT_LE((runs.apart - even) * 6, even);
        ASSERT_LE(runs.runs, most_runs);
        for (const Load& load : loads_of_runs(pieces, most_runs)) {
          ASSERT_LE(load.others, 0);
          ASSERT_LE(load.steps, runs.apart);
        }
      }
      if (HasFatalFailure()) FAIL() << "problem " << problem << ", " << most_runs << " CTAs";
    }
  }
  ASSERT_GT(apart, 100);
}

// What follows from a sequence's length alone is what its band says.
TEST(Work, WholeSequences) {
  std::mt19937 random(6);
  int whole = 0, others = 0;
  for (int problem = 0; problem < 2000; ++problem) {
    Batch batch = draw(random);
    Params& p = batch.args.params;
    if (random() % 4 > 0) {
      p.tensor[TESSERA_SEQLENS_Q].data = nullptr;
      if (!p.thd_q) p.sq = 1 + static_cast<int>(random() % 6);
    }
    if (!is_whole(p, batch.queries)) {
      ++others;
      continue;
    }
    ++whole;
    for (int n = 0; n < batch.sequences(); ++n) {
      batch.args.whole = 0;
      const CellsOf by_band = batch.cells(n);
      batch.args.whole = 1;
      const CellsOf by_length = batch.cells(n);
      ASSERT_EQ(by_length.row0, by_band.row0);
      ASSERT_EQ(by_length.units, by_band.units);
      ASSERT_EQ(by_length.first_key, by_band.first_key);
      ASSERT_EQ(by_length.steps, by_band.steps);
      ASSERT_EQ(by_length.cells, by_band.cells);
    }
  }
  ASSERT_GT(whole, 30);
  ASSERT_GT(others, 500);
}

// CTAs side by side: each has packs of its own, and all of them the same keys.
TEST(Work, SideBySide) {
  std::mt19937 random(5);
  int problems = 0;
  for (int problem = 0; problem < 150; ++problem) {
    Batch batch = draw(random);
    while (batch.beside < 4 && batch.packs() % (2 * batch.beside) == 0) batch.beside *= 2;
    if (batch.beside == 1) continue;
    ++problems;
    batch.args.least_apart = static_cast<int>(random() % 2);
    batch.args.chunks = problem % 3 == 0 ? 1 + static_cast<int>(random() % 9) : 0;
    batch.args.least_steps = 1;
    batch.point();
    for (int most_runs = 1; most_runs <= 24; most_runs += 1 + most_runs / 4) {
      batch.args.most_runs = most_runs;
      const std::vector<Placed> pieces = pieces_of(batch, 3, most_runs);
      const auto units = by_unit(pieces);
      const int slots =
          batch.args.chunks > 0 ? batch.args.units * batch.args.chunks : 2 * most_runs;
      expect_whole_units(batch, units, slots * batch.beside);
      if (most_runs % 8 == 1) expect_all_rows(batch, units);
      for (const Placed& placed : pieces) {
        const int first = placed.piece.pack / batch.beside * batch.beside;
        const auto& beside = units.at({placed.n, placed.piece.row0, first});
        ASSERT_EQ(beside.at(placed.piece.part).piece.key_begin, placed.piece.key_begin);
        ASSERT_EQ(beside.at(placed.piece.part).run, placed.run);
      }
      if (HasFatalFailure()) FAIL() << "problem " << problem << ", " << most_runs << " CTAs";
    }
  }
  ASSERT_GT(problems, 40);
}

// Batch-invariant cuts: those of a sequence alone, whatever the grid.
TEST(Work, CutsOfASequencesOwn) {
  std::mt19937 random(2);
  for (int problem = 0; problem < 150; ++problem) {
    Batch batch = draw(random);
    batch.args.chunks = 1 + static_cast<int>(random() % 9);
    batch.args.least_steps = 1 + static_cast<int>(random() % 3);
    batch.point();
    std::map<int, std::vector<std::pair<int, int>>> cuts;  // of a sequence's first unit
    for (int most_runs = 1; most_runs <= 24; most_runs += 1 + most_runs / 4) {
      const auto units = by_unit(pieces_of(batch, 5, most_runs));
      expect_whole_units(batch, units, batch.args.units * batch.args.chunks);
      if (most_runs == 1) expect_all_rows(batch, units);
      for (const auto& [unit, pieces] : units) {
        ASSERT_LE(static_cast<int>(pieces.size()), batch.args.chunks);
        std::vector<std::pair<int, int>> keys;
        for (const Placed& placed : pieces) {
          keys.emplace_back(placed.piece.key_begin, placed.piece.key_end);
        }
        const auto cut = cuts.emplace(std::get<0>(unit), keys).first;
        ASSERT_EQ(cut->second, keys);
      }
      if (HasFatalFailure()) FAIL() << "problem " << problem << ", " << most_runs << " CTAs";
    }
    if (batch.args.params.thd_q || batch.args.params.thd_k) continue;
    for (int n = 0; n < batch.sequences(); ++n) {
      Batch alone = batch;
      alone.args.params.batch = 1;
      alone.q = {batch.q[n]}, alone.k = {batch.k[n]};
      alone.point();
      for (const Placed& placed : pieces_of(alone, 1, 3)) {
        const std::pair<int, int> keys{placed.piece.key_begin, placed.piece.key_end};
        ASSERT_NE(std::ranges::find(cuts[n], keys), cuts[n].end());
      }
    }
  }
}

// Tables that no caller may give: every CTA finds a sequence, no unit is beyond the workspace, and
// the CTAs agree on how many pieces a unit has, so that no counter is left dirty.
TEST(Work, TablesThatOverlap) {
  std::mt19937 random(3);
  for (int problem = 0; problem < 60; ++problem) {
    Batch batch = draw(random);
    Params& p = batch.args.params;
    p.thd_q = 1;
    p.tensor[TESSERA_SEQLENS_Q] = {};
    p.sq = problem % 3 == 0 ? 1 << 20 : 40;
    batch.q.assign(p.batch + 1, 0);
    for (int32_t& start : batch.q) {
      start = static_cast<int32_t>(random() % 3) * (p.sq / 2) - 5;
    }
    batch.point();
    for (const int most_runs : {1, 5, 13}) {
      std::map<int, std::pair<int, int>> counts;  // pieces seen, pieces said
      for (int run = 0; run < most_runs; ++run) {
        const Found found = find_start(batch, 4, run, most_runs);
        Walk walk(batch.args, kStepKeys, found.runs, found.start, run);
        for (int piece = 0; walk.next() && piece < 20'000; ++piece) {
          ASSERT_GE(walk.sequence().n, 0);
          ASSERT_LT(walk.sequence().n, p.batch);
          const Piece at = walk.piece();
          ASSERT_GE(at.unit, 0);
          ASSERT_LT(at.unit, batch.args.units);
          if (p.sq <= 40) counts[at.unit] = {counts[at.unit].first + 1, at.parts};
        }
      }
      for (const auto& [unit, count] : counts) ASSERT_EQ(count.first, count.second);
    }
  }
}

}  // namespace
}  // namespace tessera::cuda
