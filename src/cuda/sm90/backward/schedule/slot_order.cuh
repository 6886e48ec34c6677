// SPDX-License-Identifier: Apache-2.0
// The order in which tiles of packed keys start. What a tile walks is known on the device alone, so
// that graphs serve any lengths: a CTA of the kernel before the main one (backward/rows.cuh) writes
// a table of the tiles of a head.
//
//   Sequences come by their longest tile, the longest first, each with its tiles side by side: they
//   read the same queries, which are in L2 while their neighbours want them. The last tiles, about
//   what runs in two waves, come by their own length, so that all CTAs end together. Slots without
//   work are the last ones. Among equals the order of storage remains, from the last slot to the
//   first.
//
// It is a counting sort, and the same at every run: a thread has a class of lengths and looks
// through all slots for its own, four at a time. That is a few microseconds for kMostOrderedSlots.
//
// Nothing here needs a GPU: tests/cuda/slot_order_test.cc runs the phases on the host.
#pragma once

#include "cuda/sm90/backward/schedule/schedule.cuh"

namespace tessera::cuda::sm90 {

// The class of a tile that walks so many blocks; class 0 starts first, the last one has no blocks.
// Up to 32 blocks each has one of its own, beyond them those that differ by less than a sixteenth
// share one.
TESSERA_HOST_DEVICE int class_of_blocks(int blocks) {
  constexpr int kAlone = 32, kOfOctave = 16;
  int rank = blocks;
  if (blocks >= kAlone) {
    int octave = 1;
    while (blocks >> octave >= kAlone) ++octave;
    rank = kAlone + (octave - 1) * kOfOctave + (blocks >> octave) - kOfOctave;
  }
  return rank < kSlotClasses ? kSlotClasses - 1 - rank : 0;
}

// In shared memory. Places count slots in the order that is made; arrays of bytes are read by words.
struct SlotOrder {
  static constexpr int kMost = kMostOrderedSlots, kNone = kSlotClasses;  // a class that nobody has
  static_assert(kMost % 4 == 0 && kMost <= 1 << 16 && kNone < 256);

  alignas(4) uint8_t by_sequence[kMost];  // of each slot, from the last one on: class to sort by
  alignas(4) uint8_t by_tile[kMost];      // of each place, once sequences are sorted
  uint8_t of_tile[kMost];                 // of each slot, from the last one on
  uint16_t slots[2][kMost];  // of each place: by sequences; and of the last ones, by tiles
  int counts[kSlotClasses];

  // Writes a.key_tiles. phase(body) runs body(thread) for all kSlotClasses threads and then lets
  // them meet.
  template <typename Schedule, typename Phase>
  __device__ __forceinline__ void write(const BackwardParams& a, const Phase& phase) {
    const int all = a.ordered_slots, last = (max(all - a.last_slots, 0) + 3) & ~3;
    phase([&](int thread) { classify<Schedule>(a, thread); });
    phase([&](int thread) { count(by_sequence, 0, all, thread); });
    phase([&](int thread) {
      for_each_placed(by_sequence, 0, all, thread, [&](int from, int to) {
        slots[0][to] = static_cast<uint16_t>(from);
        by_tile[to] = of_tile[from];
      });
    });
    phase([&](int thread) { count(by_tile, last, all, thread); });
    phase([&](int thread) {
      for_each_placed(by_tile, last, all, thread,
                      [&](int from, int to) { slots[1][to] = slots[0][from]; });
    });
    phase([&](int thread) {
      for (int i = thread; i < all; i += kSlotClasses) {
        const int slot = all - 1 - slots[i >= last][i];
        const TileOfRows tile = tile_of_packed_slot(a.problem, slot, Schedule::kKeys);
        a.key_tiles[i] = {tile.n, tile.begin};
      }
    });
  }

 private:
  template <typename Schedule>
  __device__ __forceinline__ void classify(const BackwardParams& a, int thread) {
    const Params& p = a.problem;
    for (int i = thread; i < kMost; i += kSlotClasses) {
      if (i >= a.ordered_slots) {
        by_sequence[i] = by_tile[i] = kNone;
        continue;
      }
      const TileOfRows rows = tile_of_packed_slot(p, a.ordered_slots - 1 - i, Schedule::kKeys);
      KeyTile tile;
      Schedule::set_sequence(p, rows.n, rows_of<SideOfQueries>(p, rows.n),
                             rows_of<SideOfKeys>(p, rows.n), tile);
      const auto blocks_from = [&](int key0) {
        tile.key0 = key0;
        Schedule::set_blocks(p, tile);
        return max(tile.end - tile.begin, 0);
      };
      const int blocks = blocks_from(rows.begin), of_first = blocks_from(0);
      of_tile[i] = static_cast<uint8_t>(class_of_blocks(blocks));
      by_sequence[i] =
          static_cast<uint8_t>(class_of_blocks(blocks > 0 ? max(blocks, of_first) : 0));
    }
  }

  // body(place) for each in [begin, end) of this class, in their order. begin: a multiple of 4;
  // kNone stands behind the last slot.
  template <typename Body>
  static __device__ __forceinline__ void for_each_of(const uint8_t* classes, int begin, int end,
                                                     int its_class, const Body& body) {
#pragma unroll 2
    for (int place = begin; place < end; place += 4) {
      const uint32_t four = *reinterpret_cast<const uint32_t*>(classes + place);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (static_cast<int>(four >> 8 * i & 0xff) == its_class) body(place + i);
      }
    }
  }
  __device__ __forceinline__ void count(const uint8_t* classes, int begin, int end, int thread) {
    int mine = 0;
    for_each_of(classes, begin, end, thread, [&](int) { ++mine; });
    counts[thread] = mine;
  }
  // body(place, its new one) for each place in [begin, end) of the thread's class.
  template <typename Body>
  __device__ __forceinline__ void for_each_placed(const uint8_t* classes, int begin, int end,
                                                  int thread, const Body& body) const {
    if (counts[thread] == 0) return;
    int to = begin;
    for (int before = 0; before < thread; ++before) to += counts[before];
    for_each_of(classes, begin, end, thread, [&](int from) { body(from, to++); });
  }
};

}  // namespace tessera::cuda::sm90
