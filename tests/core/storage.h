// SPDX-License-Identifier: Apache-2.0
// Memory for the tensors of a problem, so that buffers are legal to start from.
#pragma once

#include <cstring>
#include <vector>

#include "core/problem/dtype.h"
#include "core/problem/problem.h"

namespace tessera::testing {

class Storage {
 public:
  // Every given tensor gets zeroed memory; offsets of packed sequences are spread evenly, lengths
  // are full, page tables count up.
  explicit Storage(const Problem& problem) : problem_(problem) {
    buffers.struct_size = sizeof buffers;
    for (int i = 0; i < TESSERA_NUM_TENSORS; ++i) {
      const Tensor& t = problem.tensor[i];
      if (t.dtype == TESSERA_NONE) continue;
      int64_t reach = 1;
      for (int axis = 0; axis < tensor_rule(i).rank; ++axis) {
        if (t.extent[axis] > 1) reach += (t.extent[axis] - 1) * t.stride[axis];
      }
      memory_[i].resize(static_cast<size_t>((reach * size_of(t.dtype) + 7) / 8));
      buffers.data[i] = memory_[i].data();
    }
    const Sizes s = sizes_of(problem);
    for (int64_t n = 0; n <= s.batch; ++n) {
      set(TESSERA_CU_SEQLENS_Q, n, s.batch ? n * s.sq / s.batch : 0);
      set(TESSERA_CU_SEQLENS_K, n, s.batch ? n * s.sk / s.batch : 0);
    }
    for (int64_t n = 0; n < s.batch; ++n) {
      set(TESSERA_SEQLENS_Q, n, s.sq);
      set(TESSERA_SEQLENS_K, n, s.sk);
    }
    for (const int table : {TESSERA_PAGE_TABLE_K, TESSERA_PAGE_TABLE_V}) {
      if (!given(problem, table)) continue;
      const int64_t pages = problem.tensor[TESSERA_K].extent[0];
      const int64_t entries = element_count(problem.tensor[table], 2);
      for (int64_t i = 0; i < entries; ++i) set(table, i, i % pages);
    }
  }

  // Memory moves along, copies would leave the pointers behind.
  Storage(Storage&&) = default;
  Storage& operator=(Storage&&) = default;

  // Element i of a dense tensor; nothing where it is not given.
  void set(int index, int64_t i, double value) {
    if (given(problem_, index)) {
      store_element(buffers.data[index], i, problem_.tensor[index].dtype, value);
    }
  }

  Buffers buffers{};

 private:
  Problem problem_;
  std::vector<double> memory_[TESSERA_NUM_TENSORS];
};

}  // namespace tessera::testing
