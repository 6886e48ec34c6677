// SPDX-License-Identifier: Apache-2.0
// Which new tokens of an append have no place. As in validate/values.h an item is checked for
// itself, so that the CPU, which refuses the call, walks items one by one, a GPU, which drops the
// tokens, many at a time, and both find the same one first.
#pragma once

#include "core/cache/append.h"
#include "core/validate/values.h"

namespace tessera {

// Why tokens are lost: the first rule that an item breaks.
struct LostTokens {
  enum Kind : int32_t { kNone, kCuSeqlens, kCounts, kPlaces, kPage, kAngles };
  Kind kind;
  int64_t n;            // the sequence, or the element of cu_seqlens
  int64_t value;        // what breaks the rule
  int64_t page;         // of the sequence: its column of the table
  int64_t count;        // new tokens of the sequence
  int64_t first, last;  // those of them that are lost; with kAngles, that turn to NaN
};

// The lists that a call of append reads, as plain data, which a kernel takes as an argument.
struct AppendLists {
  Integers starts, counts, cu_seqlens, page_table;
  int64_t column_stride;  // of page_table; 0: one page for all, looked at once
  int64_t cu_items;       // elements of cu_seqlens that differ; the first items
  int64_t items;          // and then as many sequences as differ
  int64_t tokens;         // rows of k: of a sequence, or of the packed buffer
  int64_t capacity, page_size, pages;
  int64_t max_position;  // rows of cos; INT64_MAX: nothing turns

  explicit AppendLists(const AppendArgs& args);
};

// "seqlens_k[1]=9: with 4 new tokens must be ...": the refusal.
Status refuse(const AppendLists& lists, const LostTokens& lost);

// What becomes of the call on a device, which goes on: "tokens 1 to 3 of sequence 1 are dropped".
std::string fate_of(const LostTokens& lost);

namespace values {

TESSERA_HOST_DEVICE bool cu_seqlens_break(const AppendLists& lists, int64_t n, LostTokens* lost) {
  const int64_t value = integer_at(lists.cu_seqlens, n);
  const int64_t least = n == 0 ? 0 : integer_at(lists.cu_seqlens, n - 1);
  if (value >= least && value <= (n == 0 ? 0 : lists.tokens)) return false;
  *lost = {LostTokens::kCuSeqlens, n, value, 0, 0, 0, -1};
  return true;
}

// The entries of the pages that tokens [start, start + count) come to.
TESSERA_HOST_DEVICE bool pages_break(const AppendLists& lists, int64_t n, int64_t start,
                                     int64_t count, LostTokens* lost) {
  if (!lists.page_table.data || count == 0) return false;
  const auto* row =
      static_cast<const int32_t*>(lists.page_table.data) + n * lists.page_table.stride;
  const int64_t size = lists.page_size, first = start / size;
  const int64_t last = lists.column_stride == 0 ? first : (start + count - 1) / size;
  for (int64_t page = first; page <= last; ++page) {
    const int64_t value = row[page * lists.column_stride];
    if (value >= 0 && value < lists.pages) continue;
    const int64_t from = page * size - start;
    const bool to_end = lists.column_stride == 0 || from + size > count;
    *lost = {LostTokens::kPage,
             n,
             value,
             page,
             count,
             from > 0 ? from : 0,
             to_end ? count - 1 : from + size - 1};
    return true;
  }
  return false;
}

}  // namespace values

// True if item `item` breaks a rule; then *lost says how. Reads nothing outside the lists, whatever
// other items hold.
TESSERA_HOST_DEVICE bool breaks(const AppendLists& lists, int64_t item, LostTokens* lost) {
  if (item < lists.cu_items) return values::cu_seqlens_break(lists, item, lost);
  const int64_t n = item - lists.cu_items;
  int64_t count = lists.tokens;
  if (lists.cu_seqlens.data) {
    count = values::difference(values::integer_at(lists.cu_seqlens, n + 1),
                               values::integer_at(lists.cu_seqlens, n));
    if (count < 0 || count > lists.tokens) return false;  // an item of cu_seqlens says so
  } else if (lists.counts.data) {
    count = values::integer_at(lists.counts, n);
    if (count < 0 || count > lists.tokens) {
      *lost = {LostTokens::kCounts, n, count, 0, count, 0, -1};
      return true;
    }
  }
  const int64_t start = values::integer_at(lists.starts, n);
  if (start < 0 || start > lists.capacity - count) {
    const int64_t fit = start < 0 || start >= lists.capacity ? 0 : lists.capacity - start;
    *lost = {LostTokens::kPlaces, n, start, 0, count, fit, count - 1};
    return true;
  }
  if (values::pages_break(lists, n, start, count, lost)) return true;
  if (count == 0 || start + count <= lists.max_position) return false;
  const int64_t known = start < lists.max_position ? lists.max_position - start : 0;
  *lost = {LostTokens::kAngles, n, start + count - 1, 0, count, known, count - 1};
  return true;
}

}  // namespace tessera
