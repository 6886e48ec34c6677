// SPDX-License-Identifier: Apache-2.0
// What kernels know of the ragged tensor maps that machine/tensormap.h describes.
#pragma once

namespace tessera::cuda::sm90 {

constexpr int kRagged = 1 << 24;  // rows; longer sequences than this have no ragged map

}  // namespace tessera::cuda::sm90
