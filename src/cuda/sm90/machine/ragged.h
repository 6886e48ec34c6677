// SPDX-License-Identifier: Apache-2.0
// What kernels know of the ragged tensor maps that machine/tensormap.h describes.
#pragma once

#include "core/mask/philox.h"

namespace tessera::cuda::sm90 {

// The reach of a side's maps, in rows: how far they lie back, and so the longest sequence that they
// have. 0: the maps are plain. Lengths are clamped to a side's extent (common/sequence.cuh), so
// that it is enough whatever the lengths say.
TESSERA_HOST_DEVICE int reach_of(bool ragged, int extent) { return ragged ? extent : 0; }

// The place of a row for a tensor map, on its two axes of rows.
struct MapRow {
  int c2, c3;
};

// Row `row` of `length` rows that are stored from row `first` of the tensor on.
TESSERA_HOST_DEVICE MapRow map_row(int reach, int first, int length, int row) {
  return reach > 0 ? MapRow{reach - length + row, first + length} : MapRow{first + row, 0};
}

}  // namespace tessera::cuda::sm90
