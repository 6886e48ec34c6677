// SPDX-License-Identifier: Apache-2.0
// Band: which keys a query may see by position, as one monotone interval per row. Host and device;
// hosts count in 64 bits, GPUs in 32.
//
// A mask as a whole is this band AND at most one data mask (dense boolean or key ranges) AND
// segments. Everything positional is here: lengths, causal, windows, alignment. Because neither end
// of what a row sees falls from row to row, the bounds of every loop over tiles and the "no mask
// code needed" tests follow from lo(), hi() and their inverses.
//
// A new positional mask takes fields in BasicWindow, and its part of first_key() or hi() with the
// inverse, end() or first() (docs/recipes.md).
#pragma once

#include <cstdint>

#include "core/mask/philox.h"  // TESSERA_HOST_DEVICE

namespace tessera {

// Half-open [lo, hi); empty when lo >= hi.
template <typename Int>
struct BasicInterval {
  Int lo, hi;
  TESSERA_HOST_DEVICE bool empty() const { return lo >= hi; }
  TESSERA_HOST_DEVICE bool contains(Int j) const { return lo <= j && j < hi; }
};

// Which of the keys around the one under it a row sees. A field's default is what it holds without
// its mask.
template <typename Int>
struct BasicWindow {
  Int left = -1, right = -1;  // -1 = unbounded; causal is right = 0

  bool operator==(const BasicWindow&) const = default;
  template <typename To>
  TESSERA_HOST_DEVICE BasicWindow<To> as() const {
    return {static_cast<To>(left), static_cast<To>(right)};
  }
};

// What a problem says of all its sequences; band_rule_of() fills it in.
template <typename Int>
struct BasicBandRule {
  Int bottom_right = 0;  // the diagonal stands at len_k - len_q instead of 0
  BasicWindow<Int> window;
  Int shift = 0;  // the diagonal of all sequences, read without bottom_right

  // There is a mask: keys may be hidden from rows by where they stand, which the diagonal alone
  // does not.
  bool hides() const { return window != BasicWindow<Int>{}; }
};

template <typename Int>
struct BasicBand {
  using Interval = BasicInterval<Int>;

  Int len_q, len_k;         // true lengths of this sequence
  Int shift;                // the diagonal: key i + shift stands under query i
  BasicWindow<Int> window;  // keys in [i + shift - left, i + shift + right]; both >= 0

  // The band of a sequence. A side that is unbounded, or reaches further, reaches just as far as
  // there are keys: nobody has to ask, and no sum here is larger than len_q + len_k + |shift|.
  // further: how much further than the rule's this one's diagonal lies, read without bottom_right.
  TESSERA_HOST_DEVICE static BasicBand of(const BasicBandRule<Int>& rule, Int len_q, Int len_k,
                                          Int further = 0) {
    const Int shift = rule.bottom_right ? len_k - len_q : rule.shift + further;
    BasicWindow<Int> window = rule.window;
    window.left = side(window.left, len_q + shift);
    window.right = side(window.right, len_k - shift);
    return {len_q, len_k, shift, window};
  }

  // A row i of the sequence sees the keys [lo(i), hi(i)) of [0, len_k].
  TESSERA_HOST_DEVICE Int lo(Int i) const { return least(first_key(i), len_k); }
  TESSERA_HOST_DEVICE Int hi(Int i) const { return clamp(shift + window.right + 1 + i); }
  // lo(i) of a row that sees a key; of another it may lie past len_k.
  TESSERA_HOST_DEVICE Int first_key(Int i) const { return greatest(shift - window.left + i, 0); }
  // A key j of the sequence is seen by the rows [first(j), end(j)): the first whose hi is above j,
  // and the first whose lo is. first may lie past len_q and end before 0.
  TESSERA_HOST_DEVICE Int first(Int j) const { return greatest(j - shift - window.right, 0); }
  TESSERA_HOST_DEVICE Int end(Int j) const { return least(j - (shift - window.left - 1), len_q); }

  // The same band with rows counted from row m.
  TESSERA_HOST_DEVICE BasicBand from(Int m) const {
    BasicBand rest = *this;
    rest.len_q -= m;
    rest.shift += m;
    return rest;
  }

  // Keys that query i sees; empty for rows outside [0, len_q).
  TESSERA_HOST_DEVICE Interval row(Int i) const {
    if (i < 0 || i >= len_q) return {0, 0};
    return {lo(i), hi(i)};
  }

  // Keys that some query of [m0, m1) may see: the forward loop's bounds.
  TESSERA_HOST_DEVICE Interval keys(Int m0, Int m1) const {
    if (m1 > len_q) m1 = len_q;
    if (m0 < 0) m0 = 0;
    if (m0 >= m1) return {0, 0};
    return {lo(m0), hi(m1 - 1)};
  }
  // Keys that some query of the sequence may see; pages that hold none of them are never read.
  TESSERA_HOST_DEVICE Interval keys() const { return keys(0, len_q); }
  // Keys that every query of [m0, m1) sees; none if one of them does not exist.
  TESSERA_HOST_DEVICE Interval keys_of_all(Int m0, Int m1) const {
    return {lo(m1 - 1), m0 < 0 || m1 > len_q ? 0 : hi(m0)};
  }

  // Queries that may see some key of [n0, n1): the backward loop's bounds.
  TESSERA_HOST_DEVICE Interval rows(Int n0, Int n1) const {
    if (n1 > len_k) n1 = len_k;
    if (n0 < 0) n0 = 0;
    if (n0 >= n1) return {0, 0};
    return {least(first(n0), len_q), greatest(end(n1 - 1), 0)};
  }
  // Queries that see every key of [n0, n1); none if one of those does not exist.
  TESSERA_HOST_DEVICE Interval rows_of_all(Int n0, Int n1) const {
    return {first(n1 - 1), n0 < 0 || n1 > len_k ? 0 : end(n0)};
  }

  // Every query of [m0, m1) sees every key of [n0, n1): no mask code needed.
  TESSERA_HOST_DEVICE bool full(Int m0, Int m1, Int n0, Int n1) const {
    const Interval all = keys_of_all(m0, m1);
    return m0 < m1 && all.lo <= n0 && n1 <= all.hi;
  }

 private:
  TESSERA_HOST_DEVICE static Int least(Int a, Int b) { return a < b ? a : b; }
  TESSERA_HOST_DEVICE static Int greatest(Int a, Int b) { return a > b ? a : b; }
  TESSERA_HOST_DEVICE static Int side(Int reach, Int most) {
    most = greatest(most, 0);
    return reach < 0 ? most : least(reach, most);
  }
  TESSERA_HOST_DEVICE Int clamp(Int j) const { return least(greatest(j, 0), len_k); }
};

using Interval = BasicInterval<int64_t>;
using BandRule = BasicBandRule<int64_t>;
using Band = BasicBand<int64_t>;

}  // namespace tessera
