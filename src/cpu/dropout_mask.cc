// SPDX-License-Identifier: Apache-2.0
// The dropout mask of core/philox.h, written out: one Philox call decides rows {r, r + 8} x columns
// {c, c + 1, c + 8, c + 9} of each 16x16 patch.
#include <algorithm>

#include "core/philox.h"
#include "cpu/pool.h"
#include "cpu/utilities.h"

namespace tessera::cpu {
namespace {

// 16 rows from row i0 on of one head.
void write_band(const DropoutMaskArgs& args, const Dropout& dropout, uint32_t head_index,
                int64_t i0, uint8_t* keep) {
  for (int64_t j0 = 0; j0 < args.sk; j0 += 16) {
    for (int r = 0; r < 8; ++r) {
      for (int c = 0; c < 8; c += 2) {
        const Philox4 random =
            philox4x32_7(dropout.key0, dropout.key1, dropout.counter0, head_index,
                         static_cast<uint32_t>(i0 / 2 + r), static_cast<uint32_t>(j0 / 4 + c / 2));
        for (int field = 0; field < 8; ++field) {
          const int64_t i = i0 + r + (field & 4 ? 8 : 0);
          const int64_t j = j0 + c + (field & 2 ? 8 : 0) + (field & 1);
          if (i >= args.sq || j >= args.sk) continue;
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
  const int64_t bands = (args.sq + 15) / 16;
  parallel_for(context, args.b * args.hq * bands, [&](int64_t task, int) {
    const int64_t head = task / bands;
    write_band(args, dropout, static_cast<uint32_t>(head), task % bands * 16,
               args.keep + head * args.sq * args.sk);
  });
}

}  // namespace tessera::cpu
