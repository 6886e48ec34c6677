// SPDX-License-Identifier: Apache-2.0
#include "fuzz/memory.h"

#include <algorithm>
#include <cstdlib>

#include "core/problem/dtype.h"

namespace fuzz {
namespace {

int64_t element_bytes(int32_t dtype) {
  return dtype >= TESSERA_FP32 && dtype <= TESSERA_INT64 ? tessera::size_of(dtype) : 8;
}

}  // namespace

int64_t reach_of(const tessera_tensor& t, int rank) {
  __int128 last = 0;
  for (int axis = 0; axis < rank; ++axis) {
    if (t.extent[axis] < 0) return -1;
    if (t.extent[axis] == 0) return 0;
    if (t.extent[axis] > 1 && t.stride[axis] < 0) return -1;
    last += static_cast<__int128>(t.extent[axis] - 1) * t.stride[axis];
    if (last >= kMostBytes) return -1;
  }
  const __int128 bytes = (last + 1) * element_bytes(t.dtype);
  return bytes > kMostBytes ? -1 : static_cast<int64_t>(bytes);
}

void* Memory::add(int64_t bytes) {
  const auto size = static_cast<size_t>(bytes);
  auto* data = static_cast<uint8_t*>(std::malloc(size));
  for (size_t i = 0; i < size; ++i) data[i] = static_cast<uint8_t>(0x38 + i * 5 % 7);
  blocks_.push_back({{data, &std::free}, size, {}, std::vector<bool>(size, false)});
  return data;
}

void Memory::allow(const tessera_tensor& t, int rank, void* data) {
  auto* const first = static_cast<uint8_t*>(data);
  for (Block& block : blocks_) {
    // The end of a block may be where the next begins; a tensor that lies there has no elements.
    if (first < block.data.get() || first >= block.data.get() + block.bytes) continue;
    int64_t extent[4] = {1, 1, 1, 1};
    // What is expanded is one place.
    for (int axis = 0; axis < rank; ++axis)
      extent[axis] = t.stride[axis] == 0 ? std::min<int64_t>(t.extent[axis], 1) : t.extent[axis];
    const int64_t size = element_bytes(t.dtype);
    for (int64_t a = 0; a < extent[0]; ++a)
      for (int64_t b = 0; b < extent[1]; ++b)
        for (int64_t c = 0; c < extent[2]; ++c)
          for (int64_t d = 0; d < extent[3]; ++d) {
            const int64_t index[4] = {a, b, c, d};
            int64_t at = first - block.data.get();
            for (int axis = 0; axis < rank; ++axis) at += index[axis] * t.stride[axis] * size;
            for (int64_t i = 0; i < size; ++i)
              block.writable.at(static_cast<size_t>(at + i)) = true;
          }
    return;
  }
}

void Memory::remember() {
  for (Block& block : blocks_)
    block.before.assign(block.data.get(), block.data.get() + block.bytes);
}

bool Memory::is_as_remembered(bool outputs_too) const {
  return std::all_of(blocks_.begin(), blocks_.end(), [&](const Block& block) {
    for (size_t i = 0; i < block.bytes; ++i) {
      if (block.data.get()[i] != block.before[i] && (outputs_too || !block.writable[i]))
        return false;
    }
    return true;
  });
}

void put_integer(void* data, int32_t dtype, int64_t bytes, int64_t at, int64_t value) {
  const int64_t size = dtype == TESSERA_INT64 ? 8 : dtype == TESSERA_INT32 ? 4 : 1;
  if (at < 0 || at >= bytes / size) return;
  std::memcpy(static_cast<char*>(data) + at * size, &value, static_cast<size_t>(size));
}

void edit(tessera_tensor& t, Bytes& bytes) {
  const int field = bytes.below(10);
  const int64_t value = bytes.integer();
  if (field == 0) t.dtype = static_cast<int32_t>(value);
  if (field == 1) t.reserved = static_cast<int32_t>(value);
  if (field >= 2) (field < 6 ? t.extent[field - 2] : t.stride[field - 6]) = value;
}

void check_error(int32_t code, const tessera_error& error) {
  FUZZ_CHECK(code >= TESSERA_OK && code < TESSERA_FAILED);
  FUZZ_CHECK(code == error.code);
  const void* end = std::memchr(error.message, 0, sizeof error.message);
  FUZZ_CHECK(end != nullptr);
  FUZZ_CHECK((code == TESSERA_OK) == (error.message[0] == 0));
  // A refusal has a line for each backend.
  for (const char* at = error.message; *at; ++at) {
    const bool ends_line = *at == '\n' && code == TESSERA_REFUSED;
    FUZZ_CHECK(ends_line || static_cast<unsigned char>(*at) >= 0x20);
  }
}

}  // namespace fuzz
