// SPDX-License-Identifier: Apache-2.0
// What the backward kernels are told: the call, where gradients go, and how the work is cut.
//
// The work of a call is cut by shapes alone, never by the number of threads, so that results are
// the same bits for any of them. A main task is
//
//   (chunk of keys, sequence, kv head, part of the head group)
//
// With one chunk dq is the task's own, with one part dk and dv are; otherwise the tasks write fp32
// partial sums, which reduction tasks add in order. Rounds run one after the other where tasks
// would add to the same elements: sequences that share pages, heads or sequences that share a bias.
#pragma once

#include <cstdint>

#include "core/count.h"
#include "cpu/call.h"

namespace tessera::cpu {

enum class BackwardPhase : int {
  kMain,        // task: see above
  kReduceQ,     // task: (sequence, head, kReduceParts-th of the rows); dq from its partial sums
  kReduceKv,    // task: (sequence, kv head, kReduceParts-th of the rows); dk and dv likewise
  kStorePages,  // task: (kv head, kReduceParts-th of the pool); dk and dv from the fp32 pool
  kBiasBlock,   // task: (sequence or 0, head or 0, block of keys): a 16-bit dbias with sums over
                // sequences or heads, recomputed block by block so that its sums are fp32
};
inline constexpr int kReduceParts = 8;
inline constexpr int kMaxChunks = 8;

// How dbias is made.
enum class BiasGradient : int {
  kNone,
  kStore,  // each element belongs to one (sequence, head): stored where it is computed
  kAdd,    // fp32 and broadcast over sequences or heads: added in place, round by round
  kBlock,  // 16-bit and broadcast over sequences or heads: kBiasBlock
  kKeys,   // broadcast over queries: partial sums a key, reduced by the host
  kRows,   // broadcast over keys: partial sums a query, reduced by the host
};

struct BackwardArgs {
  Call call;
  Rows d_o, dq, dk, dv;  // data of a gradient that is not asked for is null
  Strided dlse;
  Strided dbias;
  int64_t bias_extent[4];
  BiasGradient bias_gradient;
  bool bias_over_sequences, bias_over_heads;  // dbias is summed over them
  bool has_starts;  // sequences may begin at any position of a plane of dbias

  int64_t bound_q;          // no sequence has more queries
  int64_t bound_k;          // or keys
  int64_t held_strips;      // strips of queries that a worker holds at a time: those that one block
                            // of keys concerns, in whole tiles, or all
  const Interval* owned_q;  // [batch] rows of dq that sequence n writes, beyond its own with zeros
  const Interval* owned_k;

  // This round's sequences and kv heads.
  int64_t sequence_begin, sequence_end;
  int64_t head_begin, head_end;
  int chunks;         // of keys
  int parts;          // of a head group
  bool shared_pages;  // dk and dv are added to the pool; chunks == parts == 1

  // fp32 partial sums in the workspace, fp64 of the sinks; null where there are none.
  //   dq_parts     [chunk][hq][strip_slots][gradient_rows(dqk)][strip]   see strip_slot(); of a
  //                chunk only the strips that the band lets see it
  //   dk_parts     [part][hk][key_slots][dqk]   see key_slot(); dv_parts likewise
  //   dk_pool      [pages * page_size][hk][dqk]  dv_pool likewise
  //   bias_keys    [hq][key_slots]
  //   bias_rows    [chunk][hq][strip_slots * strip]
  //   slope_parts  [chunk][hq][batch]
  //   sink_parts   [hq][batch]
  float *dq_parts, *dk_parts, *dv_parts, *dk_pool, *dv_pool;
  float *bias_keys, *bias_rows, *slope_parts;
  double* sink_parts;
  int64_t strip_slots, key_slots;
  int64_t pool_rows_k, pool_rows_v;
  bool packed_q, packed_k;  // thd
};

// Rows of a dQ^T, whole register tiles at every level (8, 6 or 4 rows), and matrix tiles (16).
inline __attribute__((always_inline)) int64_t gradient_rows(int64_t head_dim) {
  return (head_dim + 47) / 48 * 48;
}

// The place of the first strip of queries, and of key 0, of a sequence in partial sums. Packed
// sequences lie at their place in the buffer (one strip more each, as they do not begin on strips).
inline int64_t strip_slots_of(bool packed, int64_t batch, int64_t extent, int strip) {
  return (packed ? extent / strip + Count{batch} + 1 : Count{extent}.pieces(strip) * batch).value();
}
inline __attribute__((always_inline)) int64_t strip_slot(const BackwardArgs& args,
                                                         const CallSequence& sequence, int strip) {
  return args.packed_q ? sequence.first_q / strip + sequence.n
                       : sequence.n * ((args.bound_q + strip - 1) / strip);
}
inline __attribute__((always_inline)) int64_t key_slot(const BackwardArgs& args,
                                                       const CallSequence& sequence) {
  return args.packed_k ? sequence.first_k : sequence.n * args.bound_k;
}

}  // namespace tessera::cpu
