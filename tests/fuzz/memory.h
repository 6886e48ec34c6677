// SPDX-License-Identifier: Apache-2.0
// Memory of tensors: blocks of exactly the bytes that extents and strides reach, so that the address
// sanitizer sees one byte more; and what was written of them.
#pragma once

#include <cstdlib>
#include <memory>
#include <span>
#include <vector>

#include "core/problem/problem.h"
#include "fuzz/bytes.h"

namespace fuzz {

constexpr int64_t kMostBytes = 1 << 18;  // of a tensor

// Bytes from a tensor's first to past its last; -1: too many to be had, or a stride is negative.
int64_t reach_of(const tessera_tensor& t, int rank);

class Memory {
 public:
  // One block, of anything but NaN in every dtype.
  void* add(int64_t bytes);
  // The elements of this tensor may be written.
  void allow(const tessera_tensor& t, int rank, void* data);

  // Remembers what all blocks hold; then: whether a byte has changed that may not (or at all).
  void remember();
  bool is_as_remembered(bool outputs_too) const;

 private:
  struct Block {
    std::unique_ptr<uint8_t, decltype(&std::free)> data;
    size_t bytes;
    std::vector<uint8_t> before;
    std::vector<bool> writable;
  };
  std::vector<Block> blocks_;
};

// An integer at a place of a list, where the list has it.
void put_integer(void* data, int32_t dtype, int64_t bytes, int64_t at, int64_t value);

// One edit of a tensor: a field of it becomes any number.
void edit(tessera_tensor& t, Bytes& bytes);

// Error codes and messages are what the header says they are.
void check_error(int32_t code, const tessera_error& error);

}  // namespace fuzz
