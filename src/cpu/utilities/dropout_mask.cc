// SPDX-License-Identifier: Apache-2.0
// The dropout mask of core/mask/philox.h, written out: one Philox call decides rows {r, r + 8} x
// columns {c, c + 1, c + 8, c + 9} of each 16x16 patch.
#include "cpu/utilities/dropout_mask.h"

#include <algorithm>

#include "core/mask/philox.h"
#include "cpu/pool.h"

namespace tessera::cpu {
namespace {

// The mask of one head of one sequence.
struct Plane {
  const DropoutMaskArgs& args;
  Dropout dropout;
  uint32_t head_index;
  int64_t q_start, k_start;  // positions of its first row and column
  uint8_t* keep;             // [sq, sk]
};

// Its rows among the 16 of the patches that begin at position i0.
void write_band(const Plane& plane, int64_t i0) {
  const auto& [args, dropout, head_index, q_start, k_start, keep] = plane;
  for (int64_t j0 = k_start / 16 * 16; j0 < k_start + args.sk; j0 += 16) {
    for (int r = 0; r < 8; ++r) {
      for (int c = 0; c < 8; c += 2) {
        const Philox4 random =
            philox4x32_7(dropout.key0, dropout.key1, dropout.counter0, head_index,
                         static_cast<uint32_t>(i0 / 2 + r), static_cast<uint32_t>(j0 / 4 + c / 2));
        for (int field = 0; field < 8; ++field) {
          const int64_t i = i0 + r + (field & 4 ? 8 : 0) - q_start;
          const int64_t j = j0 + c + (field & 2 ? 8 : 0) + (field & 1) - k_start;
          if (i < 0 || j < 0 || i >= args.sq || j >= args.sk) continue;
          const uint32_t value = random.word[field / 2] >> (field % 2 * 16) & 0xFFFFu;
          keep[i * args.sk + j] = value >= args.threshold;
        }
      }
    }
  }
}

}  // namespace

void dropout_mask(const DropoutMaskArgs& args, const Buffers& context) {
  const Dropout dropout = Dropout::make(args.rng_state[0], args.rng_state[1], args.threshold);
  const DropoutHeads heads = DropoutHeads::of(args.rng_state, 1, args.rng_words, args.hq);
  const int64_t bands = args.sq / 16 + 2;  // that rows from anywhere can meet
  parallel_for(context, args.b * args.hq * bands, [&](int64_t task, int) {
    const int64_t head = task / bands, n = head / args.hq;
    const int64_t q_start = args.q_start ? args.q_start[n] : 0;
    write_band({args, dropout, heads.index(n, head % args.hq), q_start,
                args.k_start ? args.k_start[n] : 0, args.keep + head * args.sq * args.sk},
               (q_start / 16 + task % bands) * 16);
  });
}

}  // namespace tessera::cpu
