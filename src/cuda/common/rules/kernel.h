// SPDX-License-Identifier: Apache-2.0
// A row of a kernel table (kernel_table.cmake) for one element type. No CUDA header: tables are
// data, and belong into every build.
#pragma once

#include <cstdint>
#include <span>

#include "cuda/common/features.h"

namespace tessera::cuda {

// Tile: the columns of the table. Code: what nvcc makes of them.
template <typename Tile, typename Code>
struct KernelRow {
  const char* name;   // "sm90/forward/d128_lean", of all its element types
  int dtype;          // of q
  uint32_t features;  // of Feature: what it knows
  Tile tile;
  const Code* code;  // null in a build without CUDA
};

}  // namespace tessera::cuda
