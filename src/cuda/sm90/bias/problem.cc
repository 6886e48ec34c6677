// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm90/bias/problem.h"

#include "core/count.h"
#include "cuda/sm90/machine/readable.h"

namespace tessera::cuda::sm90 {
namespace {

constexpr int64_t kUnit = 8;  // elements of 16 bytes
constexpr int64_t kMostBytes = 256 << 20, kFewBytes = 64 << 20, kTimesTokens = 4;

// Where there are rows of keys, of which TMA may read each by itself.
bool has_rows(const Tensor& bias) {
  return bias.extent[2] > 1 && bias.stride[2] != 0 && bias.extent[3] > 1 && bias.stride[3] == 1;
}

Count rows_of(const Tensor& bias) {
  return Count{distinct(bias, 0)} * distinct(bias, 1) * distinct(bias, 2);
}

Tensor padded(const Tensor& bias) {
  Tensor t = bias;
  Count stride = Count{bias.extent[3]}.up_to(kUnit);
  for (int axis = 2; axis >= 0; --axis) {
    if (bias.stride[axis] == 0) continue;
    t.stride[axis] = stride.value();
    stride *= bias.extent[axis];
  }
  return t;
}

Count bytes_of_tokens(const Problem& p) {
  Count bytes;
  for (const int index : {TESSERA_Q, TESSERA_K, TESSERA_V, TESSERA_O}) {
    if (!given(p, index)) continue;
    const Tensor& t = p.tensor[index];
    Count of_tensor = size_of(t.dtype);
    for (const int64_t extent : t.extent) of_tensor *= extent;
    bytes += of_tensor;
  }
  return bytes;
}

bool is_small(const Problem& p) {
  const Count bytes = bytes_of_padded(padded(p.tensor[TESSERA_BIAS]));
  const bool too_large = Count{kMostBytes} < bytes;
  return !too_large &&
         (!(Count{kFewBytes} < bytes) || !(bytes_of_tokens(p) * kTimesTokens < bytes));
}

}  // namespace

bool pads_bias(const Problem& p) {
  const Tensor& bias = p.tensor[TESSERA_BIAS];
  return given(p, TESSERA_BIAS) && is_16bit(bias.dtype) &&
         bias.dtype == p.tensor[TESSERA_Q].dtype && has_rows(bias) && !maps_bias(p, nullptr) &&
         !has(p, TESSERA_BATCH_INVARIANT) && is_small(p);
}

Problem with_padded_bias(const Problem& problem) {
  Problem p = problem;
  if (pads_bias(problem)) p.tensor[TESSERA_BIAS] = padded(problem.tensor[TESSERA_BIAS]);
  return p;
}

int64_t rows_of_padded(const Tensor& bias) { return rows_of(bias).value(); }

int64_t bytes_of_padded(const Tensor& bias) {
  return (rows_of(bias) * bias.stride[2] * size_of(bias.dtype)).value();
}

}  // namespace tessera::cuda::sm90
