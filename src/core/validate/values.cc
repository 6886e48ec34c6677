// SPDX-License-Identifier: Apache-2.0
#include "core/validate/values.h"

#include <algorithm>
#include <cinttypes>

#include "core/count.h"
#include "core/mask/sequence.h"

namespace tessera {
namespace {

struct Side {
  int tensor, seqlens, cu_seqlens, padded, starts;
  uint32_t max_flag;
  int axis;  // of dense masks and biases
};
constexpr Side kQuerySide{TESSERA_Q,
                          TESSERA_SEQLENS_Q,
                          TESSERA_CU_SEQLENS_Q,
                          TESSERA_CU_SEQLENS_Q_PADDED,
                          TESSERA_Q_START,
                          TESSERA_MAX_SEQLEN_Q,
                          2};
constexpr Side kKeySide{TESSERA_K,
                        TESSERA_SEQLENS_K,
                        TESSERA_CU_SEQLENS_K,
                        TESSERA_CU_SEQLENS_K_PADDED,
                        TESSERA_K_START,
                        TESSERA_MAX_SEQLEN_K,
                        3};

// A dense mask or bias has an element for each position of the side.
bool has_dense(const Problem& p, const Side& side) {
  for (const int index : {TESSERA_MASK, TESSERA_BIAS}) {
    if (given(p, index) && p.tensor[index].extent[side.axis] != 1) return true;
  }
  return false;
}

const Side& side_of(int index) {
  for (const int of_queries :
       {TESSERA_SEQLENS_Q, TESSERA_CU_SEQLENS_Q, TESSERA_CU_SEQLENS_Q_PADDED}) {
    if (index == of_queries) return kQuerySide;
  }
  return kKeySide;
}

// The pool whose size bounds a page table: its own, or the smaller one where both share a table.
int pool_of(const Problem& p, int table) {
  if (table == TESSERA_PAGE_TABLE_V) return TESSERA_V;
  if (given(p, TESSERA_PAGE_TABLE_V)) return TESSERA_K;
  return p.tensor[TESSERA_K].extent[0] <= p.tensor[TESSERA_V].extent[0] ? TESSERA_K : TESSERA_V;
}

ValueRule& add(ValueRules* to, ValueRule::Kind kind, const Problem& p, const Buffers& b, int index,
               int64_t items, int64_t limit) {
  ValueRule& rule = to->rule[to->count++];
  rule.kind = kind;
  rule.index = index;
  rule.items = items;
  rule.tensor = p.tensor[index];
  rule.lengths = Tensor{};
  rule.data = b.data[index];
  rule.limit = limit;
  rule.max_seqlen = -1;
  return rule;
}

void add_lengths(ValueRules* to, const Problem& p, const Buffers& b, const Side& side,
                 int64_t extent, int64_t max_seqlen) {
  if (given(p, side.seqlens)) {
    add(to, ValueRule::kSeqlens, p, b, side.seqlens, distinct(p.tensor[side.seqlens], 0), extent);
  } else if (given(p, side.cu_seqlens)) {
    const int64_t elements = p.tensor[side.cu_seqlens].extent[0];
    const bool padded = given(p, side.padded);
    ValueRule& rule =
        add(to, ValueRule::kCuSeqlens, p, b, side.cu_seqlens, elements + (padded ? 0 : 1), extent);
    if (has(p, side.max_flag)) rule.max_seqlen = max_seqlen;
    if (given(p, side.starts) && has_dense(p, side)) {
      rule.lengths = p.tensor[side.starts];
      rule.lengths_data = b.data[side.starts];
    }
    // One place for all: the lengths are 0, and what follows the first item repeats it.
    const auto all_in_one = [](const ValueRule& list) {
      return list.tensor.stride[0] == 0 && list.lengths.stride[0] == 0;
    };
    if (all_in_one(rule)) rule.items = std::min<int64_t>(rule.items, 2);
    if (!padded) return;
    ValueRule& starts = add(to, ValueRule::kPadded, p, b, side.padded, elements, extent);
    starts.lengths = p.tensor[side.cu_seqlens];
    starts.lengths_data = b.data[side.cu_seqlens];
    if (all_in_one(starts)) starts.items = std::min<int64_t>(starts.items, 2);
  }
}

void add_pages(ValueRules* to, const Problem& p, const Buffers& b, int table) {
  if (!given(p, table)) return;
  const Tensor& t = p.tensor[table];
  const int64_t rows = distinct(t, 0) <= 1 ? distinct_sequences(p) : t.extent[0];
  const int64_t columns = distinct(t, 1);
  ValueRule& rule = add(to, ValueRule::kPages, p, b, table, (Count{rows} * columns).value(),
                        p.tensor[pool_of(p, table)].extent[0]);
  rule.tensor.extent[1] = columns;
  rule.page_size = p.tensor[TESSERA_K].extent[1];
}

PagedBands paged_bands(const Problem& p, const Buffers& b) {
  const auto list = [&](int index) {
    return given(p, index)
               ? Integers{b.data[index], p.tensor[index].stride[0], p.tensor[index].dtype}
               : Integers{};
  };
  Integers left = list(TESSERA_WINDOWS), right = left;
  if (left.data) {
    const int64_t side = p.tensor[TESSERA_WINDOWS].stride[1];
    right.data = static_cast<const char*>(left.data) + side * size_of(left.dtype);
  }
  return {.rule = band_rule_of<int64_t>(p),
          .sq = sizes_of(p).sq,
          .len_q = list(TESSERA_SEQLENS_Q),
          .cu_len_q = list(TESSERA_CU_SEQLENS_Q),
          .len_k = list(TESSERA_SEQLENS_K),
          .q_start = list(TESSERA_Q_START),
          .k_start = list(TESSERA_K_START),
          .shift = list(TESSERA_SHIFT),
          .left = left,
          .right = right};
}

void add_finite(ValueRules* to, const Problem& p, const Buffers& b, int index) {
  if (!given(p, index)) return;
  const Tensor& t = p.tensor[index];
  const int64_t columns = tensor_rule(index).rank == 2 ? distinct(t, 1) : 1;
  ValueRule& rule = add(to, ValueRule::kFinite, p, b, index, distinct(t, 0) * columns, 0);
  rule.tensor.extent[1] = columns;
}

Status refuse_cu_seqlens(const Problem& p, const ValueRule& rule, const BadValue& bad) {
  const Side& side = side_of(rule.index);
  const char* name = name_of(p, rule.index);
  if (bad.item == 0)
    return invalid("%s[0]=%" PRId64
                   ": must be 0; pass offsets, where each sequence begins and the "
                   "last one ends, not lengths",
                   name, bad.value);
  if (bad.item == rule.tensor.extent[0]) {
    return invalid("%s[%" PRId64 "]=%" PRId64 ": must be at most the %" PRId64
                   " tokens of %s.shape=%s",
                   name, bad.item - 1, bad.value, rule.limit, name_of(p, side.tensor),
                   shape_text(p, side.tensor).c_str());
  }
  if (bad.value < bad.other) {
    return invalid("%s[%" PRId64 "]=%" PRId64 ": must not be below %s[%" PRId64 "]=%" PRId64
                   "; offsets never decrease",
                   name, bad.item, bad.value, name, bad.item - 1, bad.other);
  }
  const char* letter = side.tensor == TESSERA_Q ? "q" : "k";
  if (rule.lengths.dtype != TESSERA_NONE) {
    return invalid("max_seqlen_%s=%" PRId64
                   ": must be at least %s_start + length of every sequence beside a dense mask or "
                   "bias, and sequence %" PRId64 " of length %" PRId64 " begins at %" PRId64,
                   letter, rule.max_seqlen, letter, bad.item - 1,
                   values::difference(bad.value, bad.other),
                   values::integer_at(rule.lengths, rule.lengths_data, bad.item - 1));
  }
  return invalid("max_seqlen_%s=%" PRId64 ": must be at least every length, and sequence %" PRId64
                 " has %" PRId64,
                 letter, rule.max_seqlen, bad.item - 1, values::difference(bad.value, bad.other));
}

Status refuse_padded(const Problem& p, const ValueRule& rule, const BadValue& bad) {
  const char* name = name_of(p, rule.index);
  if (bad.value < bad.other) {
    return invalid("%s[%" PRId64 "]=%" PRId64 ": must be at least %" PRId64
                   ", where the sequence before it ends",
                   name, bad.item, bad.value, bad.other);
  }
  const int tensor = side_of(rule.index).tensor;
  return invalid(
      "%s[%" PRId64 "]=%" PRId64 ": must be at most the %" PRId64 " tokens of %s.shape=%s", name,
      bad.item, bad.value, rule.limit, name_of(p, tensor), shape_text(p, tensor).c_str());
}

}  // namespace

ValueRules::ValueRules(const Problem& p, const Buffers& b) {
  const Sizes s = sizes_of(p);
  bands = paged_bands(p, b);
  for (const int index : {TESSERA_Q_START, TESSERA_K_START, TESSERA_SHIFT}) {
    const auto kind = index == TESSERA_SHIFT ? ValueRule::kShift : ValueRule::kStarts;
    if (given(p, index)) add(this, kind, p, b, index, distinct(p.tensor[index], 0), 0);
  }
  if (given(p, TESSERA_WINDOWS)) {
    const Tensor& t = p.tensor[TESSERA_WINDOWS];
    const int64_t columns = distinct(t, 1);
    ValueRule& rule =
        add(this, ValueRule::kWindows, p, b, TESSERA_WINDOWS, distinct(t, 0) * columns, 0);
    rule.tensor.extent[1] = columns;
  }
  add_lengths(this, p, b, kQuerySide, s.sq, p.max_seqlen_q);
  add_lengths(this, p, b, kKeySide, s.sk, p.max_seqlen_k);
  add_pages(this, p, b, TESSERA_PAGE_TABLE_V);
  add_pages(this, p, b, TESSERA_PAGE_TABLE_K);
  add_finite(this, p, b, TESSERA_SINK);
  add_finite(this, p, b, TESSERA_ALIBI_SLOPES);
}

Status refuse(const Problem& p, const ValueRule& rule, const BadValue& bad) {
  const char* name = name_of(p, rule.index);
  switch (rule.kind) {
    case ValueRule::kSeqlens:
      return invalid("%s[%" PRId64 "]=%" PRId64 ": must be between 0 and the extent, %" PRId64,
                     name, bad.item, bad.value, rule.limit);
    case ValueRule::kStarts:
      return invalid("%s[%" PRId64 "]=%" PRId64 ": a position must be between 0 and 2^60", name,
                     bad.item, bad.value);
    case ValueRule::kShift:
      return invalid("%s[%" PRId64 "]=%" PRId64 ": a diagonal must be between -2^60 and 2^60", name,
                     bad.item, bad.value);
    case ValueRule::kWindows: {
      const int64_t columns = rule.tensor.extent[1];
      return invalid("%s[%" PRId64 ", %" PRId64 "]=%" PRId64
                     ": a side must be -1, which is no bound, or between 0 and 2^60",
                     name, bad.item / columns, bad.item % columns, bad.value);
    }
    case ValueRule::kCuSeqlens:
      return refuse_cu_seqlens(p, rule, bad);
    case ValueRule::kPadded:
      return refuse_padded(p, rule, bad);
    case ValueRule::kPages:
      return invalid("%s[%" PRId64 ", %" PRId64 "]=%" PRId64
                     ": must be a page of %s, between 0 and %" PRId64,
                     name, bad.item / rule.tensor.extent[1], bad.item % rule.tensor.extent[1],
                     bad.value, pool_of(p, rule.index) == TESSERA_K ? "k" : "v", rule.limit - 1);
    case ValueRule::kFinite:
      break;
  }
  const int64_t columns = rule.tensor.extent[1];
  return invalid("%s[%" PRId64 "]=%g: must be finite", name,
                 columns == 1 ? bad.item : bad.item % columns,
                 load_element(&bad.value, 0, rule.tensor.dtype));
}

}  // namespace tessera
