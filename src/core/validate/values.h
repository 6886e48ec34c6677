// SPDX-License-Identifier: Apache-2.0
// What the elements of lengths, page tables, sinks and slopes must be. A rule is a number of items
// that are checked each for itself, so that the CPU walks them one by one and a GPU many at a time,
// and both find the same one first.
#pragma once

#include "core/mask/band.h"
#include "core/problem/problem.h"

namespace tessera {

// One rule about the elements of one tensor. Plain data, which a kernel takes as an argument.
struct ValueRule {
  enum Kind : int32_t { kSeqlens, kCuSeqlens, kPadded, kPages, kFinite, kStarts, kShift, kWindows };
  Kind kind;
  int32_t index;  // of the tensor
  // that differ: what is expanded is looked at once, and `tensor` has the extents that are looked at
  int64_t items;
  // lengths: cu_seqlens beside kPadded; starts beside kCuSeqlens, which a dense mask or bias has
  // places for too, or not given
  Tensor tensor, lengths;
  const void *data, *lengths_data;
  int64_t limit;       // the extent, tokens or pages that bound the values
  int64_t max_seqlen;  // read with kCuSeqlens; -1: not given
  int64_t page_size;   // read with kPages
};
inline constexpr int kMostValueRules = 12;

// Positions and diagonals reach to 2^60 on either side of 0, so that no sum of them and of a length
// overflows.
inline constexpr int64_t kMostPosition = int64_t{1} << 60;

// An item that breaks its rule: the element, and what it is compared with.
struct BadValue {
  int64_t item;
  int64_t value;  // of a floating tensor its bits
  int64_t other;
};

// A list of integers of the caller's, one a sequence: int32 or int64.
struct Integers {
  const void* data;  // null: not given
  int64_t stride;    // elements
  int32_t dtype;
};

// What decides which keys of a paged sequence its band shows to some query.
struct PagedBands {
  BandRule rule;
  int64_t sq;                // the length of every q, where neither of the next two is given
  Integers len_q, cu_len_q;  // seqlens_q, cu_seqlens_q
  Integers len_k, q_start, k_start, shift;
  Integers left, right;  // windows of sequences
};

// The rules of a problem, in the order in which their violations are reported. Those of pages come
// after those of lengths and positions, which they rely on.
struct ValueRules {
  int count = 0;
  ValueRule rule[kMostValueRules];
  PagedBands bands;  // read with kPages
  ValueRules(const Problem& problem, const Buffers& buffers);
};

// "cu_seqlens_q[2]=-7: must not be below ...": the refusal.
Status refuse(const Problem& problem, const ValueRule& rule, const BadValue& bad);

namespace values {

TESSERA_HOST_DEVICE int64_t integer_at(const Tensor& t, const void* data, int64_t i) {
  const int64_t at = i * t.stride[0];
  return t.dtype == TESSERA_INT32 ? static_cast<const int32_t*>(data)[at]
                                  : static_cast<const int64_t*>(data)[at];
}

TESSERA_HOST_DEVICE int64_t integer_at(const Integers& list, int64_t i) {
  if (!list.data) return 0;
  return list.dtype == TESSERA_INT32 ? static_cast<const int32_t*>(list.data)[i * list.stride]
                                     : static_cast<const int64_t*>(list.data)[i * list.stride];
}

// Keys of sequence n that the band shows to some query of it.
TESSERA_HOST_DEVICE Interval seen_keys(const PagedBands& bands, int64_t n) {
  const int64_t len_q = bands.len_q.data ? integer_at(bands.len_q, n)
                        : bands.cu_len_q.data
                            ? integer_at(bands.cu_len_q, n + 1) - integer_at(bands.cu_len_q, n)
                            : bands.sq;
  const int64_t further =
      integer_at(bands.shift, n) + integer_at(bands.q_start, n) - integer_at(bands.k_start, n);
  BandRule rule = bands.rule;
  if (bands.left.data) rule.window = {integer_at(bands.left, n), integer_at(bands.right, n)};
  return Band::of(rule, len_q, integer_at(bands.len_k, n), further).keys();
}

// Differences and sums of values that may be anything.
TESSERA_HOST_DEVICE int64_t difference(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) - static_cast<uint64_t>(b));
}

TESSERA_HOST_DEVICE bool is_finite(const void* data, int64_t i, int32_t dtype, int64_t* bits) {
  switch (dtype) {
    case TESSERA_FP64:
      *bits = static_cast<const int64_t*>(data)[i];
      return (*bits >> 52 & 0x7FF) != 0x7FF;
    case TESSERA_FP32:
      *bits = static_cast<const int32_t*>(data)[i];
      return (*bits >> 23 & 0xFF) != 0xFF;
    case TESSERA_BF16:
      *bits = static_cast<const int16_t*>(data)[i];
      return (*bits >> 7 & 0xFF) != 0xFF;
    case TESSERA_FP16:
      *bits = static_cast<const int16_t*>(data)[i];
      return (*bits >> 10 & 0x1F) != 0x1F;
  }
  return true;
}

}  // namespace values

// True if item `item` breaks rule `rule`; then *bad says how. Reads nothing outside the tensors,
// whatever other items hold.
TESSERA_HOST_DEVICE bool breaks(const ValueRules& rules, int rule, int64_t item, BadValue* bad) {
  const ValueRule& r = rules.rule[rule];
  int64_t value = 0, other = 0;
  bool wrong = false;
  switch (r.kind) {
    case ValueRule::kSeqlens:
      value = values::integer_at(r.tensor, r.data, item);
      wrong = value < 0 || value > r.limit;
      break;
    case ValueRule::kStarts:
      value = values::integer_at(r.tensor, r.data, item);
      wrong = value < 0 || value > kMostPosition;
      break;
    case ValueRule::kShift:
      value = values::integer_at(r.tensor, r.data, item);
      wrong = value < -kMostPosition || value > kMostPosition;
      break;
    case ValueRule::kWindows: {
      const int64_t columns = r.tensor.extent[1], at = item % columns * r.tensor.stride[1];
      value =
          values::integer_at({r.data, 1, r.tensor.dtype}, item / columns * r.tensor.stride[0] + at);
      wrong = value < -1 || value > kMostPosition;
      break;
    }
    case ValueRule::kCuSeqlens: {  // one item an element, then one for the sum of lengths
      const int64_t elements = r.tensor.extent[0];
      value = values::integer_at(r.tensor, r.data, item < elements ? item : elements - 1);
      if (item == 0) {
        wrong = value != 0;
      } else if (item < elements) {
        other = values::integer_at(r.tensor, r.data, item - 1);
        const int64_t start = r.lengths.dtype == TESSERA_NONE
                                  ? 0
                                  : values::integer_at(r.lengths, r.lengths_data, item - 1);
        const int64_t most = r.max_seqlen - (start > 0 && start <= kMostPosition ? start : 0);
        wrong = value < other || (r.max_seqlen >= 0 && values::difference(value, other) > most);
      } else {
        wrong = value > r.limit;
      }
      break;
    }
    case ValueRule::kPadded:
      value = values::integer_at(r.tensor, r.data, item);
      if (item > 0) {  // the first row that the sequence before it leaves free
        const int64_t length =
            values::difference(values::integer_at(r.lengths, r.lengths_data, item),
                               values::integer_at(r.lengths, r.lengths_data, item - 1));
        other = values::difference(values::integer_at(r.tensor, r.data, item - 1),
                                   values::difference(0, length));
      }
      wrong = value < other || value > r.limit;
      break;
    case ValueRule::kPages: {  // entries of the pages that hold a key which some query may see
      const int64_t n = item / r.tensor.extent[1], page = item % r.tensor.extent[1];
      const int64_t at = n * r.tensor.stride[0] + page * r.tensor.stride[1];
      const Interval seen = values::seen_keys(rules.bands, n);
      if (seen.empty()) return false;
      const bool one_for_all = r.tensor.extent[1] == 1;
      if (!one_for_all && (page * r.page_size >= seen.hi || (page + 1) * r.page_size <= seen.lo)) {
        return false;
      }
      value = static_cast<const int32_t*>(r.data)[at];
      wrong = value < 0 || value >= r.limit;
      break;
    }
    case ValueRule::kFinite: {
      const int64_t columns = r.tensor.extent[1];
      const int64_t at = item / columns * r.tensor.stride[0] + item % columns * r.tensor.stride[1];
      wrong = !values::is_finite(r.data, at, r.tensor.dtype, &value);
      break;
    }
  }
  if (wrong) *bad = {item, value, other};
  return wrong;
}

}  // namespace tessera
