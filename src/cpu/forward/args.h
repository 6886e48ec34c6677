// SPDX-License-Identifier: Apache-2.0
// What forward/host.cc (host) hands to forward/kernel.h (kernels of one instruction set). Plain
// data.
#pragma once

#include "cpu/call.h"

namespace tessera::cpu {

// A piece of forward work. A tile is up to tile_m rows of one kv head of one sequence, in strips:
//   kTile  tokens [begin, begin + count) of the query heads [head, head + heads), a head a strip
//   kSplit packed rows [begin, begin + count) of each of kv_heads kv heads, row r = (token r /
//          group, head r % group), against keys [key_begin, key_end) only if partials are many; for
//          few tokens
//   kMerge the same rows of one kv head: puts their partials together
//   kFill  rows [begin, begin + count) of the storage, all heads: o = 0, lse = -inf, unless they
//          hold a part that the call adds to
struct ForwardTask {
  enum Kind : int32_t { kTile, kSplit, kMerge, kFill };
  Kind kind;
  int32_t sequence;  // kFill: index on the batch axis
  int32_t head;      // first query head
  int32_t heads;     // kSplit, kMerge: group
  int32_t kv_heads;  // kTile: 1
  int64_t begin, count;
  int64_t key_begin, key_end;  // multiples of the block; key_end may be past the last key
  int64_t chunks;              // kSplit: as many of that length follow each other, a partial each
  int64_t partial;             // index of this one, or of the first; -1: writes o itself
  int64_t partial_step;        // kSplit: from one kv head to the next
  int64_t partials;            // kMerge: how many
};

// Whatever decides how much scratch a worker needs.
struct ForwardShape {
  int64_t dqk, dv;
  int64_t rows;               // of a tile, each kv head's rounded up to whole strips
  bool convert_k, convert_v;  // not multiplied as they lie
  bool spread_k, spread_v;    // fp32 rows in one set of L1: copied for tiles of many strips
  bool bf16;                  // bf16 products
  bool widens_fp8;            // k or v is fp8, which few rows multiply as bf16
  bool decodes;               // some sequence may be short
  bool uniform;               // rows are computed in one way, however few there are
};

struct ForwardArgs {
  Call call;
  ForwardShape shape;
  const ForwardTask* tasks;
  char* partials;  // m, l, O^T of the strips of a split tile, each partial_bytes long
  int64_t partial_bytes;
};

}  // namespace tessera::cpu
