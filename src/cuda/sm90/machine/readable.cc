// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm90/machine/readable.h"

#include "core/problem/dtype.h"

namespace tessera::cuda::sm90 {
namespace {

constexpr int64_t kAlignment = 16, kElementBytes = 2;

bool is_of_queries(int index) {
  return index == TESSERA_Q || index == TESSERA_O || index == TESSERA_DO || index == TESSERA_DQ;
}
bool is_of_keys(int index) {
  return index == TESSERA_K || index == TESSERA_V || index == TESSERA_DK || index == TESSERA_DV;
}

}  // namespace

bool maps_bias(const Problem& problem, const void* base) {
  const Tensor& bias = problem.tensor[TESSERA_BIAS];
  const auto accepts = [&](int axis) {
    const int64_t stride = bias.stride[axis];
    return bias.extent[axis] <= 1 || (stride % 8 == 0 && stride < kMostStride);
  };
  return bias.dtype == problem.tensor[TESSERA_Q].dtype && bias.extent[2] > 1 &&
         bias.stride[2] > 0 && bias.extent[3] > 1 && bias.stride[3] == 1 && accepts(0) &&
         accepts(1) && accepts(2) && reinterpret_cast<uintptr_t>(base) % kAlignment == 0;
}

RowAxes row_axes(uint64_t address, int64_t rows, int64_t row_bytes, int64_t reach) {
  const auto extent = static_cast<uint64_t>(rows), stride = static_cast<uint64_t>(row_bytes);
  if (reach == 0) return {address, {extent, 1}, {stride, kAlignment}};
  const auto back = static_cast<uint64_t>(reach);
  return {address - back * stride, {back, extent + 1}, {stride, stride}};
}

// Divides, since the product may not fit in 64 bits.
bool in_address_space(uint64_t address, int64_t row_bytes, int64_t reach) {
  return address > 0 &&
         static_cast<uint64_t>(reach) <= (address - 1) / static_cast<uint64_t>(row_bytes);
}

int64_t bytes_of_stride(int64_t stride, int64_t extent) {
  return extent > 1 ? stride * kElementBytes : kAlignment;
}

bool is_ragged_q(const Problem& problem) {
  return is_thd_q(problem) || given(problem, TESSERA_SEQLENS_Q);
}
bool is_ragged_k(const Problem& problem) {
  return is_thd_k(problem) || given(problem, TESSERA_SEQLENS_K);
}

Unaddressable first_unaddressable(const Problem& problem, const Buffers& buffers,
                                  std::span<const int> indices) {
  const bool ragged_q = is_ragged_q(problem), ragged_k = is_ragged_k(problem);
  for (const int index : indices) {
    if (!given(problem, index)) continue;
    const Tensor& tensor = problem.tensor[index];
    const int64_t rows = tensor.extent[1], row_bytes = bytes_of_stride(tensor.stride[1], rows);
    const auto address = reinterpret_cast<uintptr_t>(buffers.data[index]);
    const bool ragged = (is_of_queries(index) && ragged_q) || (is_of_keys(index) && ragged_k);
    const char* rule = nullptr;
    if (address % kAlignment != 0) {
      rule = "must be a multiple of 16";
    } else if (ragged && !in_address_space(address, row_bytes, rows)) {
      rule = "with lengths, must be greater than seqlen times the bytes from row to row";
    }
    if (rule) return {tensor_rule(index).name, buffers.data[index], rule};
  }
  return {};
}

}  // namespace tessera::cuda::sm90
