// SPDX-License-Identifier: Apache-2.0
#pragma once

#define __host__
#define __device__
#define __forceinline__ inline

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct float2 {
  float x, y;
};
struct int2 {
  int x, y;
};
