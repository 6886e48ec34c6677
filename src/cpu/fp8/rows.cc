// SPDX-License-Identifier: Apache-2.0
#include "cpu/fp8/rows.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>

#include "core/mask/sequence.h"
#include "core/problem/scales.h"
#include "cpu/pool.h"
#include "cpu/simd/kernels.h"

namespace tessera::cpu {
namespace {

constexpr int64_t kTaskRows = 64;  // rows of all heads: some 64 KiB of fp32 at 2 heads of 128

using Table = std::array<float, 256>;

Table values_of(int32_t dtype) {
  Table table{};
  for (int byte = 0; byte < 256; ++byte) {
    const auto bits = static_cast<uint8_t>(byte);
    table[bits] = static_cast<float>(load_element(&bits, 0, dtype));
  }
  return table;
}

const Table& table_of(int32_t dtype) {
  static const Table e4m3 = values_of(TESSERA_E4M3), e5m2 = values_of(TESSERA_E5M2);
  return dtype == TESSERA_E4M3 ? e4m3 : e5m2;
}

void narrow(const float* from, float scale, int64_t count, void* to, int64_t at, int32_t dtype) {
  if (!is_fp8(dtype)) {
    return kernels().round_row(dtype, from, count, static_cast<char*>(to) + at * size_of(dtype));
  }
  for (int64_t c = 0; c < count; ++c) store_scaled(to, at + c, dtype, from[c], scale);
}

// The bits of a positive float grow with it, and those of NaN are above all.
uint32_t largest_bits(const float* values, int64_t count) {
  uint32_t largest = 0;
  for (int64_t c = 0; c < count; ++c) {
    largest = std::max(largest, std::bit_cast<uint32_t>(values[c]) & 0x7FFFFFFFu);
  }
  return largest;
}

void raise_to(uint32_t* to, uint32_t value) {
  std::atomic_ref<uint32_t> held(*to);
  uint32_t seen = held.load(std::memory_order_relaxed);
  while (seen < value && !held.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
  }
}

bool is_key_side(int index) { return index == TESSERA_K || index == TESSERA_V; }

}  // namespace

void widen_row(const void* data, int64_t at, int32_t dtype, float scale, int64_t count, float* to) {
  if (is_fp8(dtype)) {
    const Table& table = table_of(dtype);
    const auto* bytes = static_cast<const uint8_t*>(data) + at;
    for (int64_t c = 0; c < count; ++c) to[c] = scale * table[bytes[c]];
    return;
  }
  std::fill_n(to, count, 0.0f);
  kernels().add_row(dtype, static_cast<const char*>(data) + at * size_of(dtype), count, scale, to);
}

void widen_rows(const Problem& p, const Buffers& b, int index, float* to) {
  const Tensor& t = p.tensor[index];
  const bool keys = is_key_side(index);
  const int scale = scale_of(index);
  const int64_t heads = t.extent[2], columns = t.extent[3];
  const int64_t pieces = (t.extent[1] + kTaskRows - 1) / kTaskRows;
  parallel_for(b, sizes_of(p).batch * pieces, [&](int64_t task, int) {
    const Sequence s = sequence_of(p, b, task / pieces);
    const int64_t batch = keys ? s.batch_k : s.batch_q, first = keys ? s.first_k : s.first_q;
    const int64_t begin = task % pieces * kTaskRows;
    const int64_t end = std::min(keys ? s.len_k() : s.len_q(), begin + kTaskRows);
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t h = 0; h < heads; ++h) {
        float* row = to + ((batch * t.extent[1] + first + i) * heads + h) * columns;
        const auto factor = static_cast<float>(scale_at(p, b, scale, s.n, h, i));
        widen_row(b.data[index], offset_of(t, batch, first + i, h), t.dtype, factor, columns, row);
      }
    }
  });
}

void narrow_rows(const Problem& p, const Buffers& b, int index, const float* from, int64_t step) {
  const Tensor& t = p.tensor[index];
  const int64_t heads = t.extent[2], columns = t.extent[3], rows = t.extent[0] * t.extent[1];
  const int amax = amax_of(index);
  auto* largest = given(p, amax) ? static_cast<uint32_t*>(b.data[amax]) : nullptr;
  if (largest) *largest = 0;
  const auto factor = static_cast<float>(scale_at(p, b, scale_of(index), 0, 0, 0));
  parallel_for(b, (rows + kTaskRows - 1) / kTaskRows, [&](int64_t task, int) {
    const int64_t begin = task * kTaskRows, end = std::min(rows, begin + kTaskRows);
    const float* row = from + begin * heads * step;
    uint32_t most = 0;
    for (int64_t r = begin; r < end; ++r) {
      for (int64_t h = 0; h < heads; ++h, row += step) {
        const int64_t at = offset_of(t, r / t.extent[1], r % t.extent[1], h);
        narrow(row, factor, columns, b.data[index], at, t.dtype);
        if (largest) most = std::max(most, largest_bits(row, columns));
      }
    }
    if (largest) raise_to(largest, most);
  });
}

}  // namespace tessera::cpu
