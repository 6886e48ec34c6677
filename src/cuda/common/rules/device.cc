// SPDX-License-Identifier: Apache-2.0
#include "cuda/common/rules/device.h"

namespace tessera::cuda {

DeviceTraits imagined_traits(const Device& device) {
  // Multiprocessors: of the GPU with the most of them that is sold as such. Shared memory: CUDA C++
  // Programming Guide, technical specifications by compute capability.
  static constexpr DeviceTraits kTraits[] = {
      {80, 108, 163 << 10},   // A100
      {86, 84, 99 << 10},     // A40
      {87, 16, 163 << 10},    // Orin
      {89, 142, 99 << 10},    // L40S
      {90, 132, 227 << 10},   // H100, H200
      {100, 148, 227 << 10},  // B200
      {120, 188, 99 << 10},   // RTX PRO 6000
      {121, 48, 99 << 10},    // GB10
  };
  for (const DeviceTraits& traits : kTraits) {
    if (traits.arch == device.arch) return traits;
  }
  return {device.arch, 132, 227 << 10};
}

}  // namespace tessera::cuda
