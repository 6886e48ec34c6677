// SPDX-License-Identifier: Apache-2.0
// Band: which keys a query may see by position, as one monotone interval per row. Host and device.
//
// A mask as a whole is this band AND at most one data mask (dense boolean or key ranges) AND
// segments. Everything positional is here: lengths, causal, windows, alignment. Because lo and hi
// never decrease with the row, tile skipping and the "no mask code needed" test follow from row().
// To add a positional mask, add its fields here and its line in row(); lo and hi must stay
// monotone.
#pragma once

#include <cstdint>

#include "core/philox.h"  // TESSERA_HOST_DEVICE

namespace tessera {

// Half-open [lo, hi); empty when lo >= hi.
struct Interval {
  int64_t lo, hi;
  TESSERA_HOST_DEVICE bool empty() const { return lo >= hi; }
  TESSERA_HOST_DEVICE bool contains(int64_t j) const { return lo <= j && j < hi; }
};

struct Band {
  int64_t len_q, len_k;  // true lengths of this sequence
  int64_t shift;         // the diagonal: key i + shift stands under query i
  int64_t left, right;   // keys in [i + shift - left, i + shift + right]; -1 = unbounded

  // Keys that query i sees, inside [0, len_k]; empty for rows outside [0, len_q).
  TESSERA_HOST_DEVICE Interval row(int64_t i) const {
    if (i < 0 || i >= len_q) return {0, 0};
    const int64_t p = i + shift;
    Interval keys{0, len_k};
    // left and right are clamped by Sequence so that neither sum overflows.
    if (left >= 0) keys.lo = clamp(p - left);
    if (right >= 0) keys.hi = clamp(p + right + 1);
    return keys;
  }

  // Keys that some query of [m0, m1) may see: the forward loop's bounds.
  TESSERA_HOST_DEVICE Interval keys(int64_t m0, int64_t m1) const {
    if (m1 > len_q) m1 = len_q;
    if (m0 >= m1) return {0, 0};
    return {row(m0).lo, row(m1 - 1).hi};
  }

  // Queries that may see some key of [n0, n1): the backward loop's bounds.
  TESSERA_HOST_DEVICE Interval rows(int64_t n0, int64_t n1) const {
    if (n1 > len_k) n1 = len_k;
    if (n0 >= n1) return {0, 0};
    Interval queries{0, len_q};
    if (right >= 0 && n0 - right - shift > 0) queries.lo = n0 - right - shift;   // hi(i) > n0
    if (left >= 0 && n1 + left - shift < len_q) queries.hi = n1 + left - shift;  // lo(i) < n1
    if (queries.hi < 0) queries.hi = 0;
    if (queries.lo > len_q) queries.lo = len_q;
    return queries;
  }

  // Every query of [m0, m1) sees every key of [n0, n1): no mask code needed.
  TESSERA_HOST_DEVICE bool full(int64_t m0, int64_t m1, int64_t n0, int64_t n1) const {
    return m0 >= 0 && m1 <= len_q && m0 < m1 && row(m1 - 1).lo <= n0 && n1 <= row(m0).hi;
  }

 private:
  TESSERA_HOST_DEVICE int64_t clamp(int64_t j) const { return j < 0 ? 0 : j > len_k ? len_k : j; }
};

}  // namespace tessera
