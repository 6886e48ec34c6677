// SPDX-License-Identifier: Apache-2.0
// The order in which tiles of keys start, and how many CTAs share one. No GPU is asked.
//
// CTAs start in the order of their index, each on the multiprocessor that is free first, so what a
// call takes can be foretold: a small model runs the schedule for a few ways to cut it and takes
// the shortest. It counts in steps, an owner's work on a block of queries (about 2 us on an H200).
#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "core/problem/problem.h"
#include "cuda/sm90/backward/kernels.h"
#include "cuda/sm90/backward/params.h"

namespace tessera::cuda::sm90 {

// How the tiles of a pass are cut and ordered. Sections of heads follow one another, in each the
// longest tiles of all of its heads first; the last section takes what is left.
struct TileOrder {
  int heads_per_section, heads_of_last;
  // Parts of tiles, see BackwardParams; empty: nothing is shared.
  std::vector<uint16_t> first_part;
  std::vector<uint8_t> tile_at;
  double steps;  // until the last CTA ends, as the model says

  int parts() const { return first_part.empty() ? 0 : first_part.back(); }
  int stored_parts() const;  // up to the last one of a tile that is shared
};

// What the model needs to know.
struct TileWork {
  std::vector<int> blocks;  // of queries that each tile of a head walks
  int heads, group;         // key heads of the batch; query heads that share one
  int workers;              // CTAs that run at a time
  bool can_share;           // tiles
  bool in_sections;         // tiles clear and convert for others (backward/fused/sections.cuh)
  int heads_per_section;    // to begin with
  int64_t bytes_of_head;    // that the tiles of a key head share: q, dO and sums of dQ
  int64_t bytes_of_part;    // that a part of a tile leaves
  int64_t most_bytes;       // that all parts may leave
  bool operator==(const TileWork&) const = default;
};
TileOrder best_order(const TileWork& work);

// Steps until the last CTA ends.
double schedule_length(const TileWork& work, const TileOrder& order);

// The orders of the last few problems, so that a call does not run the model again. Any thread.
class TileOrders {
 public:
  TileOrder find(const TileWork& work) const;

 private:
  mutable std::mutex mutex_;
  mutable std::array<std::pair<TileWork, TileOrder>, 8> known_;
  mutable size_t next_ = 0;
};

// Fills what KeySchedule (schedule.cuh) reads of an order of `heads` key heads, of tiles_n tiles
// each; of a packed side, of the key heads of one sequence. a.problem and a.tiles must be set.
void set_order(const TileOrder& order, int heads, int tiles_n, BackwardParams& a);

// Fills what `a` says of tiles, sections and parts. a.problem and a.slots must be set. longest:
// queries of the longest sequence, as far as the host can know (most_queries).
void order_tiles(const BackwardKernel& kernel, const Problem& problem, int64_t longest,
                 int multiprocessors, const TileOrders& orders, BackwardParams& a);

// What tiles that are shared have in the workspace: floats of the sums of parts, and counters.
struct SharedCounts {
  int64_t sums, arrivals;
};
SharedCounts shared_counts(const BackwardKernel& kernel, const BackwardParams& a);

}  // namespace tessera::cuda::sm90
