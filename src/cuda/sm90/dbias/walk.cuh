// SPDX-License-Identifier: Apache-2.0
// The order in which dbias/kernel.cuh does its work. One thread walks it, copies what the
// warpgroups need to shared memory, and writes down what they are to do; they know nothing of
// lengths and layouts.
#pragma once

#include "cuda/common/sequence.cuh"
#include "cuda/sm90/backward/edges.cuh"
#include "cuda/sm90/dbias/kernels.h"
#include "cuda/sm90/dbias/params.h"
#include "cuda/sm90/machine/pipeline.cuh"
#include "cuda/sm90/machine/ptx.cuh"

namespace tessera::cuda::sm90 {

// A tile of keys of one head of one sequence, whose K and V a slot holds.
struct Visit {
  Sequence sequence;
  int head, key0;
  int begin, end;  // blocks of queries that see some key
  MapRow row0;     // of query 0
  int64_t stats;   // where the statistics of query 0 are
};

// What the warpgroups are told to do next.
//   kAdd     a stage of Q and dO, beside the K and V of a visit, to one of the sums
//   kFinish  the sums of some blocks are complete: store them, and begin again with zeros
struct alignas(16) Command {
  enum What { kStop, kAdd, kFinish };
  int what;
  int block;  // kAdd: of queries; kFinish: the first of them
  union {
    int sum;     // kAdd: which one
    int blocks;  // kFinish: how many
  };
  int key0, n, head;   // kAdd: of the visit; kFinish: of the bias
  int slot_and_phase;  // kAdd: 2 slot + phase of its full barrier: where K and V are, or will be
  int clean;           // kAdd: every query of the block sees every key of the tile
  int released;        // a bit for each slot that is not needed any more
  int term;            // kFinish: of the sums that dbias_sum adds
  int unused[2];

  // Reads shared memory; called by all lanes.
  static __device__ __forceinline__ Command load(uint32_t address) {
    const uint4 x = load_shared_words(address), y = load_shared_words(address + 16);
    const uint2 z = load_shared_two_words(address + 32);
    const auto integer = [](uint32_t word) { return static_cast<int>(word); };
    return {.what = integer(x.x),
            .block = integer(x.y),
            .sum = integer(x.z),
            .key0 = integer(x.w),
            .n = integer(y.x),
            .head = integer(y.y),
            .slot_and_phase = integer(y.z),
            .clean = integer(y.w),
            .released = integer(z.x),
            .term = integer(z.y)};
  }
};
static_assert(sizeof(Command) == 48);

// What a CTA does in one go.
struct DbiasItem {
  int bias_n, bias_head;
  int tile, tile_end;    // of keys
  int pair, pair_step;   // (sequence, head), counted through those that share an element
  int block, block_end;  // of queries
  int term;              // of the sums that dbias_sum adds
};

// Items are counted by sections of bias rows; in a section the rows vary fastest, then the tiles of
// keys, then the share of pairs, then the group of blocks.
__device__ __forceinline__ DbiasItem item_of(const DbiasCut& cut, int index) {
  const int per_section = cut.items / cut.sections, in_section = cut.bias_rows / cut.sections;
  const int section = index / per_section;
  int rest = index - section * per_section;
  const int bias_row = section * in_section + rest % in_section;
  rest /= in_section;
  DbiasItem item;
  item.bias_n = bias_row / cut.extent[1];
  item.bias_head = bias_row % cut.extent[1];
  item.tile = 0;
  item.tile_end = cut.tiles_n;
  if (cut.extent[3] > 1) {
    item.tile = rest % cut.tiles_n;
    item.tile_end = item.tile + 1;
    rest /= cut.tiles_n;
  }
  item.term = cut.extent[2] > 1 ? 0 : rest;
  item.pair = rest % cut.pair_step;
  item.pair_step = cut.pair_step;
  item.block = rest / cut.pair_step * cut.group_size;
  item.block_end = min(item.block + cut.group_size, cut.tiles_m);
  return item;
}

// A Dbias: its shapes and its shared memory.
template <typename T>
concept DbiasShape = requires {
  typename T::SharedStorage;
  typename T::Shared;
  T::kTile;
  T::kBlocks;
  T::kCommands;
};

template <DbiasShape Kernel>
class DbiasProducer {
 public:
  static constexpr int kTileM = DbiasTile::kTileM, kTileN = DbiasTile::kTileN;
  static constexpr int kSlots = Kernel::kTile.kv_slots, kBlocks = Kernel::kBlocks;
  using Storage = typename Kernel::SharedStorage;

  __device__ __forceinline__ DbiasProducer(const DbiasParams& a,
                                           const typename Kernel::Shared& shared, Storage& storage)
      : a_(a), shared_(shared), storage_(storage) {}

  // Blocks come last one first: all tiles of a causal problem see the last.
  __device__ __forceinline__ void run() {
    const DbiasCut& cut = a_.cut;
    const int grid = gridDim.x;
#pragma unroll 1
    for (int first = 0, round = 0; first < cut.items; first += grid, ++round) {
      // There and back again: who had a long item has a short one next.
      const int index = first + static_cast<int>(round % 2 ? grid - 1 - blockIdx.x : blockIdx.x);
      if (index < cut.items) walk(item_of(cut, index));
    }
    send({.what = Command::kStop});
  }

 private:
  static constexpr uint32_t kNothing = 8;  // in place of 2 slot + phase: nothing is seen
  static_assert(2 * kSlots <= kNothing && 4 * kSlots <= 32);

  __device__ __forceinline__ void walk(const DbiasItem& item) {
    const DbiasCut& cut = a_.cut;
    const bool by_block = cut.extent[2] > 1 && cut.extent[3] > 1;
    const int pairs = cut.sequences * cut.heads;
    uint32_t resident = 0;  // four bits for each pair: 2 slot + phase, or kNothing
    uint32_t opened = 0;    // a bit for each slot
    if (cut.resident) {
      for (int pair = 0; pair < pairs; ++pair) {
        resident |= (2 * ring_.stage + ring_.phase) << 4 * pair;
        const int slot = ring_.stage;
        if (open(item, pair, item.tile, item.block, item.block_end)) {
          opened |= 1u << slot;
        } else {
          resident |= kNothing << 4 * pair;
        }
      }
    }
    int end = item.block_end;
    do {  // once, at least, where all blocks share a sum
      const int begin = by_block ? max(end - kBlocks, item.block) : item.block;
#pragma unroll 1
      for (int pair = item.pair; pair < pairs; pair += item.pair_step) {
#pragma unroll 1
        for (int tile = item.tile; tile < item.tile_end; ++tile) {
          uint32_t slot_and_phase = resident >> 4 * pair & 15;
          if (!cut.resident) {
            slot_and_phase = 2 * ring_.stage + ring_.phase;
            if (!open(item, pair, tile, begin, end)) continue;
          } else if (slot_and_phase & kNothing) {
            continue;
          }
          const int slot = slot_and_phase >> 1;
          const Visit& visit = storage_.visits[slot];
          const int low = max(visit.begin, begin), high = min(visit.end, end);
#pragma unroll 1
          for (int block = high - 1; block >= low; --block) {
            add(visit, block, by_block ? block - begin : 0, slot_and_phase,
                !cut.resident && block == low ? 1 << slot : 0);
          }
        }
      }
      const bool last = begin == item.block;
      send({.what = Command::kFinish,
            .block = begin,
            .blocks = by_block ? end - begin : 1,
            .key0 = item.tile * kTileN,
            .n = item.bias_n,
            .head = item.bias_head,
            .released = last ? static_cast<int>(opened) : 0,
            .term = item.term});
      end = begin;
    } while (by_block && end > item.block);
  }

  // A visit of the blocks [begin, end), in the next slot; false: they see nothing of it.
  __device__ __forceinline__ bool open(const DbiasItem& item, int pair, int tile, int begin,
                                       int end) {
    const Params& p = a_.problem;
    const int slot = ring_.stage, key0 = tile * kTileN;
    const int n = item.bias_n + pair / a_.cut.heads, head = item.bias_head + pair % a_.cut.heads;
    const Sequence sequence = sequence_of(p, n);
    const Interval queries = sequence.band.rows(key0, key0 + kTileN);
    const int visit_begin = max(queries.lo / kTileM, begin),
              visit_end = min((queries.hi + kTileM - 1) / kTileM, end);
    if (queries.empty() || visit_begin >= visit_end) return false;
    const auto barriers = shared_.kv_barriers();
    mbarrier_wait(barriers.empty(slot), ring_.phase ^ 1);
    Visit& visit = storage_.visits[slot];
    visit.sequence = sequence;
    visit.head = head;
    visit.key0 = key0;
    visit.begin = visit_begin;
    visit.end = visit_end;
    visit.row0 = map_row(a_.reach_q, sequence.q, 0);
    const int slot_of_rows =
        first_slot_of(p.thd_q, n, sequence.q.first, a_.tile_m, (p.sq + a_.tile_m - 1) / a_.tile_m);
    visit.stats = (int64_t{head} * a_.slots + slot_of_rows) * a_.tile_m;
    const uint32_t full = barriers.full(slot);
    mbarrier_arrive_expect(full, Kernel::KTile::kBytes + Kernel::VTile::kBytes);
    const int kv_head = head / p.group, batch = sequence.k.batch;
    const MapRow row = map_row(a_.reach_k, sequence.k, key0);
    Kernel::KTile::load(shared_.k(slot), &a_.k, full, kv_head, row.c2, row.c3, batch);
    Kernel::VTile::load(shared_.v(slot), &a_.v, full, kv_head, row.c2, row.c3, batch);
    ring_.advance();
    return true;
  }

  __device__ __forceinline__ void add(const Visit& visit, int block, int sum, int slot_and_phase,
                                      int released) {
    constexpr int kRowBytes = kTileM * 4;
    const int stage = q_ring_.stage, query0 = block * kTileM;
    const auto barriers = shared_.q_barriers();
    const int chunks =
        Kernel::kPlain ? min((a_.cut.extent[3] - visit.key0 + kChunkColumns - 1) / kChunkColumns,
                             kTileN / kChunkColumns)
                       : 0;
    barriers.acquire(q_ring_, Kernel::QTile::kBytes + Kernel::GradOTile::kBytes + 2 * kRowBytes +
                                  chunks * Kernel::BiasTile::kChunkBytes);
    const uint32_t full = barriers.full(stage);
    const int batch = visit.sequence.q.batch, c2 = visit.row0.c2 + query0, c3 = visit.row0.c3;
    Kernel::QTile::load(shared_.q(stage), &a_.q, full, visit.head, c2, c3, batch);
    Kernel::GradOTile::load(shared_.grad_o(stage), &a_.grad_o, full, visit.head, c2, c3, batch);
    bulk_load(shared_.lse2(stage), a_.lse2 + visit.stats + query0, kRowBytes, full);
    bulk_load(shared_.delta(stage), a_.delta + visit.stats + query0, kRowBytes, full);
    if (Kernel::kPlain) {
      for (int chunk = 0; chunk < chunks; ++chunk) {
        tma_load(shared_.bias(stage) + chunk * Kernel::BiasTile::kChunkBytes, &a_.bias, full,
                 visit.key0 + chunk * kChunkColumns, visit.head * a_.bias_of_head, query0, 0,
                 visit.sequence.n * a_.bias_of_sequence);
      }
    }
    q_ring_.advance();
    const Interval of_all = visit.sequence.band.keys_of_all(query0, query0 + kTileM);
    send({.what = Command::kAdd,
          .block = block,
          .sum = sum,
          .key0 = visit.key0,
          .n = visit.sequence.n,
          .head = visit.head,
          .slot_and_phase = slot_and_phase,
          .clean = of_all.lo <= visit.key0 && visit.key0 + kTileN <= of_all.hi,
          .released = released});
  }

  __device__ __forceinline__ void send(const Command& command) {
    const auto barriers = shared_.command_barriers();
    mbarrier_wait(barriers.empty(command_ring_.stage), command_ring_.phase ^ 1);
    storage_.commands[command_ring_.stage] = command;
    mbarrier_arrive(barriers.full(command_ring_.stage));
    command_ring_.advance();
  }

  const DbiasParams& a_;
  const typename Kernel::Shared& shared_;
  Storage& storage_;
  Ring<kSlots> ring_;
  Ring<Kernel::kTile.q_stages> q_ring_;
  Ring<Kernel::kCommands> command_ring_;
};

}  // namespace tessera::cuda::sm90
