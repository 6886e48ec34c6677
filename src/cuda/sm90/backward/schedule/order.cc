// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm90/backward/schedule/order.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <queue>

namespace tessera::cuda::sm90 {
namespace {

// What q, do and the sums of the heads in flight may take of 50 MB of L2; and in the deterministic
// form, where tiles wait less if more heads stand side by side.
constexpr int64_t kL2Bytes = 32 << 20, kL2BytesInTurn = 48 << 20;
constexpr int kMostInTurn = 8;

// Costs of the model, in steps: the ends of a tile, leaving a part's sums, and for the part that
// comes last each pair that it adds up.
constexpr double kEnds = 2.5, kLeaving = 1.2, kAdding = 1.8;
constexpr int kMostPartsOfTile = 32;
// What all parts leave, where dQ's sums do not take twice as much.
constexpr int64_t kMostStored = 64 << 20;
// CTAs for each multiprocessor. If they are many the last ones matter little; sharing tiles is
// worth it only where they are few.
constexpr int kManyRounds = 16, kFewRounds = 6;

int ceil_div(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

// True if packed sequences start longest first and walk downwards in step. On an H200 the gradients
// of 47 sequences of up to 612 tokens, 28 heads on 4, go from 592 to 493 us by it, 6 of up to 2048
// from 550 to 463; but 4 of up to 16k from 7.57 to 7.98 ms, and 900 of 10, whose order nothing hides,
// from 121 to 177 us. longest: queries, if the caller says how many; else all tokens.
bool are_put_in_order(const Params& p, int64_t longest, bool in_turn) {
  constexpr int64_t kShortest = 128, kLongest = 2048, kTimesMean = 4;
  if (!p.thd_q || !p.thd_k || in_turn || p.batch < 2) return false;
  return p.sk / p.batch >= kShortest && std::min(longest, kTimesMean * p.sq / p.batch) <= kLongest;
}

// True if tiles of a key head that start together come by the same blocks together: from the first
// or the last one of the sequence on. Each starts two blocks on from the one before under a window,
// and where packed tiles walk upwards, as those do that are not put in order. Whoever takes all heads
// of a group at a block then comes to what its neighbour has read when the L2 has lost it; of one head
// after the other it is still there.
bool starts_in_step(const Params& p, bool are_in_order) {
  if (p.window.right < 0) return true;
  if (p.thd_k) return p.window.left < 0 && are_in_order;
  return p.window.left < 0 || 2 * (int64_t{p.window.left} + p.window.right + 1) > p.sq;
}

// Heads side by side cost reads where what their tiles share does not stay in L2. So many CTAs of a
// head run at a time and read a block together: one alone would take 1.45 times as long, eight cost
// nothing (an H200, 2k to 12k tokens). Those of large groups are less in step.
double slowdown(const TileWork& work, int heads_side_by_side) {
  const double bytes = static_cast<double>(heads_side_by_side) * work.bytes_of_head;
  const double beyond = std::log2(bytes / (48 << 20));
  if (beyond <= 0) return 1;
  const double alone = static_cast<double>(heads_side_by_side) / work.workers;
  // Heads that need far more than the L2 holds lose what their tiles share even where these walk in
  // step: 10359 tokens of 32/8 heads took 1.27 times as long, 11347 of 48/8 1.36.
  return 1 + 0.45 * std::min(alone * alone, 1.0) + (work.group >= 8 ? 0.02 * beyond : 0) +
         0.2 * std::max(beyond - 1.6, 0.0);
}

// What the small kernels clear and convert for the heads whose sums no tile does it for.
double small_kernels(const TileWork& work, const TileOrder& order) {
  constexpr double kStepsOfByte = 0.08e-6;
  if (!work.in_sections) return 0;
  return kStepsOfByte * order.heads_of_last * static_cast<double>(work.bytes_of_head);
}

// Steps of the longest part: as take_part() of backward/schedule/schedule.cuh cuts a tile.
int steps_of_part(int blocks, int group, int parts) {
  int by_heads = parts;
  while (parts % by_heads != 0 || group % by_heads != 0) --by_heads;
  return ceil_div(blocks, parts / by_heads) * (group / by_heads);
}

// The tiles of a head in `most` parts or a few less, of which the longest is as short as can be.
TileOrder cut(const TileWork& work, int most) {
  std::vector<int> parts(work.blocks.size(), 1);
  std::priority_queue<std::pair<int, size_t>> longest;
  for (size_t i = 0; i < parts.size(); ++i) longest.push({work.blocks[i] * work.group, i});
  for (int all = static_cast<int>(parts.size()); all < most;) {
    const auto [steps, i] = longest.top();
    longest.pop();
    int more = parts[i], shorter = steps;  // as many as make a difference
    while (shorter >= steps && more < kMostPartsOfTile && all + more - parts[i] < most) {
      shorter = steps_of_part(work.blocks[i], work.group, ++more);
    }
    if (shorter >= steps) break;
    all += more - parts[i];
    parts[i] = more;
    longest.push({shorter, i});
  }
  const auto steps = [&](size_t i) { return steps_of_part(work.blocks[i], work.group, parts[i]); };
  TileOrder order{work.heads, work.heads, {0}, {}, 0};
  for (size_t i = 0; i < parts.size(); ++i) order.tile_at.push_back(static_cast<uint8_t>(i));
  std::stable_sort(order.tile_at.begin(), order.tile_at.end(),
                   [&](size_t i, size_t j) { return steps(i) > steps(j); });
  for (const size_t i : order.tile_at) {
    order.first_part.push_back(static_cast<uint16_t>(order.first_part.back() + parts[i]));
  }
  return order;
}

// Heads of the last section, of at least `heads`, so that the others divide what is left.
int last_section(int heads, int per_section, int least) {
  int last = std::clamp(least, std::min(per_section, heads), heads);
  const int beyond = (heads - last) % per_section;
  return last + beyond;
}

// Its dK and dV in fp32.
int64_t bytes_of_part(const BackwardTile& tile) {
  return int64_t{4} * tile.tile_n() * (tile.dqk + tile.dv);
}

// True if sums are cleared and converted by tiles of other sections (backward/fused/sections.cuh).
// A tile of sections of few tiles and many queries would have more to clear than the next can wait
// for.
bool runs_in_sections(const BackwardKernel& kernel, int multiprocessors, const BackwardParams& a) {
  const Params& p = a.problem;
  return is_plain(kernel.tile, kernel.features) && p.tensor[TESSERA_DQ].data &&
         p.tensor[TESSERA_DK].data && p.tensor[TESSERA_DV].data && !p.thd_q && !p.thd_k &&
         a.slots > 0 && 2 * a.per_section.divisor >= multiprocessors && a.last_head > 0;
}

// What the tiles of a key head read and add to while `group` of its heads are at one block.
int64_t bytes_of_heads(const Params& p, int group) {
  const int64_t bytes_of_row = 2 * (p.dqk + p.dv) + 4 * p.dqk;
  return std::max<int64_t>(int64_t{group} * p.sq * bytes_of_row, 1);
}

// What tiles in flight may read and add to: L2, of which those that take turns use more.
int64_t bytes_in_flight(const BackwardKernel& kernel, const Params& p) {
  if (!kernel.tile.deterministic) return kL2Bytes;
  return p.window.right >= 0 ? kL2BytesInTurn : 2 * kL2Bytes;
}

// Key heads that stand side by side over packed keys, a divisor of all: as many as have in L2 what
// tiles of the longest sequence share. Those of short ones share little.
int section_of_packed(const BackwardKernel& kernel, const Params& p, int64_t longest) {
  const int64_t bytes = std::max<int64_t>(bytes_of_heads(p, 1) / std::max(p.sq, 1) * longest, 1);
  const int section =
      static_cast<int>(std::clamp<int64_t>(bytes_in_flight(kernel, p) / bytes, 1, p.hk));
  return divisor_up_to(p.hk, section);
}

// Key heads of a section, before the model has a say. group: as of bytes_of_heads().
int section_to_begin_with(const BackwardKernel& kernel, const Params& p, int multiprocessors,
                          int heads, int tiles_n, int group) {
  const bool in_turn = kernel.tile.deterministic, is_causal = p.window.right >= 0;
  int section = static_cast<int>(
      std::clamp<int64_t>(bytes_in_flight(kernel, p) / bytes_of_heads(p, group), 1, heads));
  if (in_turn) {
    section = std::min({group > 1 ? kMostInTurn : section, kMostInTurn,
                        is_causal && group == 1 ? std::max(heads / 2, 1) : heads});
  }
  // About a wave: tiles that clear and convert for other sections leave least to the small kernels
  // if sections are short, and those of groups alternate (order_tiles).
  if (is_plain(kernel.tile, kernel.features) || (!in_turn && is_causal && p.group > 1)) {
    section = std::clamp((multiprocessors + tiles_n / 2) / tiles_n, 1, heads);
  }
  // Tiles of documents read little: of more heads side by side the last ones are shorter.
  if (!in_turn && kernel.features & kSegments) section = std::min(4 * section, heads);
  return section;
}

// Blocks of queries that each tile of keys walks, of sequences that fill their tensors.
std::vector<int> blocks_of_tiles(const Params& p, int tile_m, int tile_n) {
  const Band band = Band::of(p, p.sq, p.sk);
  std::vector<int> blocks;
  for (int key = 0; key < p.sk; key += tile_n) {
    const Interval rows = band.rows(key, key + tile_n);
    blocks.push_back(rows.empty() ? 0 : ceil_div(rows.hi, tile_m) - rows.lo / tile_m);
  }
  return blocks;
}

// Lets the tiles of packed keys start in an order that is found on the device
// (backward/schedule/slot_order.cuh). Those that all start at once need none.
void order_slots(const BackwardKernel& kernel, int multiprocessors, BackwardParams& a) {
  constexpr int kLastWaves = 2;  // in which tiles come by their own length
  const Params& p = a.problem;
  const int workers = multiprocessors / kernel.tile.ctas();
  if (a.slots == 0 || a.tiles <= workers || a.tiles / p.hk > kMostOrderedSlots) return;
  a.ordered_slots = a.tiles / p.hk;
  a.last_slots = kLastWaves * workers / a.heads_per_section.divisor;
}

}  // namespace

int TileOrder::stored_parts() const {
  int stored = 0;
  for (size_t i = 1; i < first_part.size(); ++i) {
    if (first_part[i] - first_part[i - 1] > 1) stored = first_part[i];
  }
  return stored;
}

double schedule_length(const TileWork& work, const TileOrder& order) {
  std::priority_queue<double, std::vector<double>, std::greater<>> free_at;
  for (int i = 0; i < work.workers; ++i) free_at.push(0);
  double end = 0;
  const auto run = [&](double steps, int times) {
    for (int i = 0; i < times; ++i) {
      const double ends = free_at.top() + steps;
      free_at.pop();
      free_at.push(ends);
      end = std::max(end, ends);
    }
  };
  for (int head = 0; head < work.heads;) {
    const bool last = head == work.heads - order.heads_of_last;
    const int heads = last ? order.heads_of_last : order.heads_per_section;
    for (size_t i = 0; i < work.blocks.size(); ++i) {
      const bool in_parts = order.parts() > 0;
      const int parts = in_parts ? order.first_part[i + 1] - order.first_part[i] : 1;
      const int blocks = work.blocks[in_parts ? order.tile_at[i] : i];
      const int steps = steps_of_part(blocks, work.group, parts);
      if (parts > 1) run(steps + kEnds + kLeaving, heads * (parts - 1));
      run(steps + kEnds + (parts > 1 ? kLeaving + kAdding * std::bit_width(parts - 1u) : 0), heads);
    }
    head += heads;
  }
  return end;
}

TileOrder best_order(const TileWork& work) {
  const int tiles = static_cast<int>(work.blocks.size());
  TileOrder best;
  double least = INFINITY;
  const auto consider = [&](TileOrder order) {
    order.steps = schedule_length(work, order);
    const int ctas = order.parts() > 0 ? order.parts() : tiles;
    // Tiles of a section that is far less than a wave start while those of the one before still add
    // to what they are to convert.
    const bool waits = work.in_sections && order.heads_of_last < work.heads &&
                       10 * order.heads_per_section * ctas < 9 * work.workers;
    const double cost = order.steps * slowdown(work, order.heads_of_last) * (waits ? 1.2 : 1) +
                        small_kernels(work, order);
    if (cost < least * 0.995) least = cost, best = std::move(order);
  };
  const auto consider_sections = [&](TileOrder order, int per_section) {
    const int ctas = order.parts() > 0 ? order.parts() : tiles;
    order.heads_per_section = per_section;
    int before = 0;
    for (const double waves : {0.0, 1.5, 2.5, 1e6}) {
      const double of_last = std::min<double>(waves * work.workers / ctas, work.heads);
      order.heads_of_last =
          last_section(work.heads, per_section, static_cast<int>(std::lround(of_last)));
      if (order.heads_of_last != before) consider(order);
      before = order.heads_of_last;
    }
  };
  const int per_section = work.heads_per_section;
  if (int64_t{tiles} * work.heads > int64_t{kManyRounds} * work.workers) {
    const int least = ceil_div(2 * work.workers, tiles);
    return {per_section, last_section(work.heads, per_section, least), {}, {}, 0};
  }
  // Sections of about a wave, or of another number of heads with nothing left over.
  consider_sections({}, per_section);
  consider_sections({}, std::min(per_section + 1, work.heads));
  const int divisor = divisor_up_to(work.heads, per_section);
  if (divisor < per_section) consider_sections({}, divisor);
  const bool few = tiles * work.heads <= kFewRounds * work.workers && tiles <= kMostTilesInParts;
  if (!work.can_share || !few) return best;
  std::vector<int> cuts{5 * tiles / 4, 3 * tiles / 2, 2 * tiles};
  for (const double waves : {0.6, 0.75, 0.9, 1.0, 1.15, 1.3, 1.5, 1.75, 2.0, 2.5, 3.0}) {
    cuts.push_back(static_cast<int>(waves * work.workers / work.heads));
  }
  for (const int parts : cuts) {
    if (parts <= tiles) continue;
    const TileOrder order = cut(work, parts);
    if (order.stored_parts() * work.heads * work.bytes_of_part > work.most_bytes) continue;
    const int ctas = order.parts();
    consider_sections(order, std::clamp((work.workers + ctas / 2) / ctas, 1, work.heads));
  }
  return best;
}

TileOrder TileOrders::find(const TileWork& work) const {
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [known, order] : known_) {
      if (known == work) return order;
    }
  }
  TileOrder order = best_order(work);
  const std::lock_guard lock(mutex_);
  known_[next_++ % known_.size()] = {work, order};
  return order;
}

void set_order(const TileOrder& order, int heads, int tiles_n, BackwardParams& a) {
  // Heads of a packed side have slots, those of the tiles of all sequences.
  const Params& p = a.problem;
  const int ctas_of_head = order.parts() > 0 ? order.parts() : p.thd_k ? a.tiles / p.hk : tiles_n;
  a.tiles_n = Divisor::of(tiles_n);
  a.heads = Divisor::of(p.hk);
  a.heads_per_section = Divisor::of(order.heads_per_section);
  a.per_section = Divisor::of(order.heads_per_section * ctas_of_head);
  a.heads_of_last = Divisor::of(order.heads_of_last);
  a.last_head = heads - order.heads_of_last;
  a.first_of_last = a.last_head * ctas_of_head;
  a.parts = order.parts();
  a.stored_parts = order.stored_parts();
  std::copy(order.first_part.begin(), order.first_part.end(), a.first_part);
  std::copy(order.tile_at.begin(), order.tile_at.end(), a.tile_at);
}

void order_tiles(const BackwardKernel& kernel, const Problem& problem, int64_t longest,
                 int multiprocessors, const TileOrders& orders, BackwardParams& a) {
  const Params& p = a.problem;
  const bool shares_bias = kernel.tile.sums_dbias && problem.tensor[TESSERA_DBIAS].extent[0] == 1;
  a.sequences = shares_bias ? std::max(p.batch, 1) : 1;
  const int tile_n = kernel.tile.tile_n();
  const bool in_turn = kernel.tile.deterministic, is_causal = p.window.right >= 0;
  const int tiles_n = ceil_div(p.sk, tile_n);
  const int batch = p.batch / a.sequences, heads = p.thd_k ? p.hk : batch * p.hk;
  a.tiles = num_tile_slots(p.thd_k, p.sk, batch, tile_n) * p.hk;
  a.longest_first = is_causal || in_turn;
  const bool are_in_order = are_put_in_order(p, longest, in_turn);
  a.heads_inner = !swaps_loops(kernel.tile, kernel.features) || starts_in_step(p, are_in_order);
  const int group = a.heads_inner ? p.group : 1;  // heads that tiles are at together
  // Where groups are large, tiles stay in step. Those of a first section start together and walk
  // downwards; those of a second one start as the shortest of the first end, and walk upwards: each
  // begins at its diagonal when the one before comes by there. Packed ones that start sequence by
  // sequence all walk downwards.
  a.alternates =
      !in_turn && is_causal && p.group > 1 && a.heads_inner && (!p.thd_k || are_in_order);

  const int64_t bytes_of_head = bytes_of_heads(p, group);
  int per_section = p.thd_k
                        ? section_of_packed(kernel, p, longest)
                        : section_to_begin_with(kernel, p, multiprocessors, heads, tiles_n, group);
  // Deterministic tiles wait for each other, and the lengths of packed ones are not known.
  const bool is_foreseen = !in_turn && !p.thd_q && !p.thd_k &&
                           !(kernel.features & (kMasks | kSegments)) && a.sequences == 1;
  TileOrder order;
  if (is_foreseen) {
    const int64_t bytes_of_sums = int64_t{a.slots} * p.hq * kernel.tile.sums_of_dq() * 4;
    order =
        orders.find({blocks_of_tiles(p, kernel.tile.tile_m, tile_n), heads, p.group,
                     multiprocessors / kernel.tile.ctas(), can_share(kernel.tile, kernel.features),
                     is_plain(kernel.tile, kernel.features), per_section, bytes_of_head,
                     bytes_of_part(kernel.tile), std::max(kMostStored, bytes_of_sums / 2)});
    a.longest_first |= order.parts() > 0;
  } else {
    per_section = divisor_up_to(heads, per_section);
    order = {per_section, per_section, {}, {}, 0};
  }
  if (in_turn && is_causal) {
    // The last section begins with its longest tiles, so that all CTAs end together. Tiles of
    // groups are long and few: all of them do. None can where masks leave blocks out.
    a.upward_sections = p.thd_k || kernel.features & (kMasks | kSegments) ? heads / per_section
                        : group == 1                                      ? heads / per_section - 1
                                                                          : 0;
  }
  set_order(order, heads, tiles_n, a);
  a.num_arrivals = heads * a.stored_parts * 4 * BackwardTile::kOwners;
  if (runs_in_sections(kernel, multiprocessors, a)) a.ahead = order.heads_per_section;
  if (are_in_order) order_slots(kernel, multiprocessors, a);
}

SharedCounts shared_counts(const BackwardKernel& kernel, const BackwardParams& a) {
  const int64_t heads = a.last_head + a.heads_of_last.divisor;
  return {heads * a.stored_parts * bytes_of_part(kernel.tile) / 4, a.num_arrivals};
}

}  // namespace tessera::cuda::sm90
