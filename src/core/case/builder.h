// SPDX-License-Identifier: Apache-2.0
// Builder: from a case to a problem. geometry.cc decides what there is, place.cc where it lies.
#pragma once

#include <initializer_list>

#include "core/case/case.h"
#include "core/count.h"

namespace tessera {

class Builder {
 public:
  explicit Builder(const Case& c) : c_(c) {}
  CaseGeometry build();

 private:
  void resolve_lengths();
  void place_tokens();
  void place_scores();
  void place_lengths();
  void resolve_positions();
  void place_positions();
  void place_rounding();
  void place_scale(int index, CaseScale scale, int64_t heads, int64_t rows, int64_t block);
  void expand_inputs();
  void place_row_statistics(int index, bool output);

  // q, k, v or their gradients: parts that share rows of one buffer, or one tensor alone.
  struct Part {
    int index;
    int32_t dtype;
    int64_t heads, dim;
  };
  enum class Join { kBeforeHeads, kAfterHeads };
  void place_rows(std::initializer_list<Part> parts, int32_t format, int64_t batch, int64_t rows,
                  Join join);
  void place_pool(int index, int32_t dtype, int64_t pages, int64_t dim);
  // Contiguous in the order of its axes; with strided and pad_rows, apart.
  void place_dense(int index, int32_t dtype, std::initializer_list<int64_t> extent, bool pad_rows,
                   int64_t last_stride = 1);
  void place_broadcast(int index, int32_t dtype, const std::string& letters);
  // The distance between neighbours of `extent` elements: with strided, odd and never touching.
  Count apart(Count extent) const { return c_.strided ? Count{(extent + 1).value() | 1} : extent; }
  Tensor& tensor(int index, int32_t dtype) {
    g_.owner[index] = index;
    g_.problem.tensor[index].dtype = dtype;
    return g_.problem.tensor[index];
  }

  const Case& c_;
  CaseGeometry g_{};
  bool backward_, paged_, thd_q_, thd_k_, same_lengths_ = false;
  int32_t statistic_;         // dtype of lse and its kin
  int64_t batch_q_, rows_q_;  // extents of q's batch and seqlen axes
  int64_t batch_k_, rows_k_;  // of k's, without pages
  int64_t max_pages_ = 0;
  int64_t extent_q_, extent_k_;  // what masks and biases call sq and sk
};

}  // namespace tessera
