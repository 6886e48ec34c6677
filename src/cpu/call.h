// SPDX-License-Identifier: Apache-2.0
// Call: one problem with its buffers as plain data, resolved once by host code (make_call) and read
// by the kernels of both passes. Every stride is in bytes, and 0 on an axis that is broadcast, so
// that a kernel forms an address without a question. Nothing here is owned.
#pragma once

#include <cstdint>

#include "core/mask/band.h"
#include "core/mask/philox.h"
#include "tessera.h"

namespace tessera::cpu {

// A tensor with axes of its own, up to [a, b, c, d]. data is null when it is not given.
struct Strided {
  char* data;
  int32_t dtype;
  int64_t stride[4];
};

// q, k, v, o and their gradients: rows of head_dim contiguous elements. If there are pages, batch
// is the page and row the place in it.
struct Rows {
  char* data;
  int32_t dtype;
  int64_t batch, row, head;
};

// The pages in which the keys of a paged side lie. table is null without pages.
struct Pages {
  const char* table;  // int32 [batch, max_pages]
  int64_t stride[2];
  int64_t page_size;
};

// One sequence: Sequence of core/mask/sequence.h, in a header that kernels may include.
struct CallSequence {
  int64_t n;
  int64_t first_q, first_k;  // row of the packed buffer where position 0 is stored
  int64_t batch_q, batch_k;
  int64_t q_start, k_start;  // positions of query 0 and key 0: of dropout and key ranges
  int64_t dense_q, dense_k;  // where dense masks and biases have them: the same in thd, else 0
  Band band;                 // of rows and keys that are counted from 0
};

struct Call {
  int64_t batch, hq, hk, group, dqk, dv;  // group = hq / hk
  Rows q, k, v, o;
  Pages k_pages, v_pages;
  Strided k_scale, v_scale;  // [b, hk] fp32: what an fp8 element is multiplied by

  // x = softcap(scale (s + pre-scale bias)) + post-scale bias - slope |i + shift - j|. Kernels hold
  // x * score_unit: log2(e) forward, whose exp2 subtracts a maximum of its own; 1 backward, where
  // x - lse must be rounded as what it is, small. If raw, x = scale s and scale > 0, so that S may
  // stay as the product left it and hidden scores be -inf before the scale.
  bool raw;
  float score_unit;
  bool bias_pre_scale;
  float softmax_scale;
  float score_scale;   // softmax_scale * score_unit
  float scale_log2;    // softmax_scale * log2(e)
  float softcap;       // 0: none
  Strided bias;        // [b, hq, sq, sk]
  int64_t bias_ahead;  // bytes from a bias to the one that its row is asked for next: a block of
                       // keys forward; 0 backward, where other queries come first
  Strided slopes;      // [b, hq]

  // Visibility beside the band.
  Strided mask;        // [b, hq, sq, sk] bytes of 0 and 1
  uint8_t mask_hides;  // the byte that hides
  bool mask_by_key;    // one row for all queries: hidden keys may hold anything, NaN included
  Strided key_ranges;  // [b, hq, row, 2 or 4] int32; the row of a packed buffer for thd
  int key_range_columns;
  bool key_ranges_thd;
  Strided segments_q, segments_k;  // [batch axis of the side, row of the side] int32

  bool has_sink;
  Strided sink;  // [hq]; null with has_sink: off-by-one
  bool has_dropout;
  Dropout dropout;
  DropoutHeads dropout_heads;
  float dropout_scale;  // 1 without dropout

  bool adds;          // outputs are added to what they hold: o and lse merged, gradients summed
  Strided lse;        // [b, hq, row]; for thd b is 1 and row one of the packed buffer
  Strided max_logit;  // [hq]

  const CallSequence* sequences;  // [batch]

  const volatile int32_t* interrupt;  // tessera_buffers.interrupt
};

// True if the caller wants the call to end. Kernels look between tiles, and leave results as they
// are.
inline __attribute__((always_inline)) bool interrupted(const Call& call) {
  return call.interrupt && *call.interrupt != 0;
}

inline constexpr float kLog2e = 1.44269504f;
inline constexpr float kLn2 = 0.693147181f;

// Resolves a validated problem. sequences: room for sizes_of(problem).batch of them, filled here.
// Among outputs only o, lse and max_logit are resolved; rows_of and strided_of serve for the
// others.
Call make_call(const tessera_problem& problem, const tessera_buffers& buffers,
               CallSequence* sequences);

// True if there is no query: b or sq is 0, or no token is packed. Results for keys and heads are
// then those of no rows, whatever the other extents, and no call is made of the problem.
bool has_no_rows(const tessera_problem& problem);

Rows rows_of(const tessera_problem& problem, const tessera_buffers& buffers, int index);
Strided strided_of(const tessera_problem& problem, const tessera_buffers& buffers, int index);

}  // namespace tessera::cpu
