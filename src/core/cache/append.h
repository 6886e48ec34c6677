// SPDX-License-Identifier: Apache-2.0
// The rules of tessera_append, and where a token goes.
#pragma once

#include "core/problem/problem.h"

namespace tessera {

using AppendArgs = tessera_append_args;

// Shapes, dtypes, strides, pointers and overlap, and on the CPU the values of lengths, tables and
// scales; nothing has been written when this fails.
Status validate(const AppendArgs& args, const Device& device);

// The caller's struct as this library knows it.
Result<const AppendArgs*> import_append(const tessera_append_args* caller, AppendArgs& storage);

// Arguments that are validated, as a loop over tokens reads them.
class AppendPlaces {
 public:
  explicit AppendPlaces(const AppendArgs& args);

  int64_t batch() const { return batch_; }

  // How many sequences, from the first, tell of all: of where their tokens go; and of all that is
  // written, which the others would write again.
  int64_t distinct_lists() const { return distinct_lists_; }
  int64_t distinct() const { return distinct_; }

  // The most new tokens of a sequence.
  int64_t longest() const;

  // New tokens of sequence n, and the row of k, v and q where its first one stands: (n, 0), or for
  // thd the row of the packed buffer (0, cu_seqlens[n]).
  int64_t count(int64_t n) const;
  int64_t first_row(int64_t n) const;
  bool packed() const { return packed_; }

  // Position of the first new token, which is its place in the cache.
  int64_t start(int64_t n) const;

  // Row and batch element (or page) of the cache that hold position p of sequence n.
  struct Place {
    int64_t batch, row;
  };
  Place place(int64_t n, int64_t p) const;

  // Positions that a sequence has room for.
  int64_t capacity() const { return capacity_; }

 private:
  const AppendArgs& args_;
  bool packed_, paged_;
  int64_t batch_, page_size_, capacity_;
  int64_t distinct_lists_ = batch_, distinct_ = batch_;
};

}  // namespace tessera
