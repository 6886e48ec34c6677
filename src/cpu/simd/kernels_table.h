// SPDX-License-Identifier: Apache-2.0
// make_kernels<S>(): the table of one level, filled from the templates. Included by kernels_*.cc
// alone, once in each.
#pragma once

#include "cpu/backward/kernel.h"
#include "cpu/forward/kernel.h"
#include "cpu/simd/kernels.h"
#include "cpu/tiles.h"
#include "cpu/utilities/merge_rows.h"

namespace tessera::cpu {
namespace {

template <typename S>
constexpr Kernels make_kernels(const char* name) {
  return {
      .name = name,
      .strip = Tile<S>::kStrip,
      .block = Tile<S>::kBlock,
      .decode_block = Tile<typename S::Narrow>::kBlock,
      .has_bf16_dot = S::kHasBf16Dot,
      .forward_scratch_bytes = forward_scratch_bytes<S>,
      .forward_partial_bytes = forward_partial_bytes<S>,
      .forward = forward_task<S>,
      .backward_scratch_bytes = backward_scratch_bytes<S>,
      .backward = backward_task<S>,
      .add_row = add_row<S>,
      .round_row = round_row<S>,
  };
}

}  // namespace
}  // namespace tessera::cpu
