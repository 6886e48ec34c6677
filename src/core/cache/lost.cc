// SPDX-License-Identifier: Apache-2.0
#include "core/cache/lost.h"

#include <cinttypes>

#include "core/problem/import.h"

namespace tessera {
namespace {

Integers integers_of(const AppendArgs& args, int index) {
  const Tensor& t = args.tensor[index];
  if (t.dtype == TESSERA_NONE) return {};
  return {args.data[index], t.extent[0] > 1 ? t.stride[0] : 0, t.dtype};
}

}  // namespace

AppendLists::AppendLists(const AppendArgs& args)
    : starts(integers_of(args, TESSERA_APPEND_SEQLENS)),
      counts(integers_of(args, TESSERA_APPEND_SEQLENS_Q)),
      cu_seqlens(integers_of(args, TESSERA_APPEND_CU_SEQLENS)),
      page_table(integers_of(args, TESSERA_APPEND_PAGE_TABLE)) {
  const AppendPlaces places(args);
  const Tensor &table = args.tensor[TESSERA_APPEND_PAGE_TABLE],
               &cache = args.tensor[TESSERA_APPEND_K_CACHE], &cos = args.tensor[TESSERA_APPEND_COS],
               &cu = args.tensor[TESSERA_APPEND_CU_SEQLENS];
  column_stride = distinct(table, 1) > 1 ? table.stride[1] : 0;
  cu_items = cu.dtype == TESSERA_NONE ? 0 : distinct(cu, 0);
  items = cu_items + places.distinct_lists();
  tokens = args.tensor[TESSERA_APPEND_K].extent[1];
  capacity = places.capacity();
  page_size = cache.extent[1];
  pages = cache.extent[0];
  max_position = cos.dtype == TESSERA_NONE ? INT64_MAX : cos.extent[0];
}

Status refuse(const AppendLists& lists, const LostTokens& lost) {
  switch (lost.kind) {
    case LostTokens::kNone:
      break;
    case LostTokens::kCuSeqlens:
      return invalid("cu_seqlens[%" PRId64 "]=%" PRId64
                     ": must begin with 0, not fall, and end at %" PRId64 " or less, the rows of k",
                     lost.n, lost.value, lists.tokens);
    case LostTokens::kCounts:
      return invalid("seqlens_q[%" PRId64 "]=%" PRId64 ": must be from 0 to %" PRId64
                     ", the tokens of k",
                     lost.n, lost.value, lists.tokens);
    case LostTokens::kPlaces:
      return invalid("seqlens_k[%" PRId64 "]=%" PRId64 ": with %" PRId64
                     " new tokens must be from 0 to %" PRId64
                     ", what the cache holds; give it more room",
                     lost.n, lost.value, lost.count, lists.capacity);
    case LostTokens::kPage:
      return invalid("page_table[%" PRId64 ", %" PRId64 "]=%" PRId64
                     ": must be from 0 to below %" PRId64 ", the pages of k_cache",
                     lost.n, lost.page, lost.value, lists.pages);
    case LostTokens::kAngles:
      return invalid("cos.shape=[%" PRId64 ", ...]: sequence %" PRId64 " comes to position %" PRId64
                     "; pass longer tables",
                     lists.max_position, lost.n, lost.value);
  }
  return {};
}

std::string fate_of(const LostTokens& lost) {
  if (lost.kind == LostTokens::kCuSeqlens) return "rows of no sequence are dropped";
  if (lost.last < lost.first) return "no token is dropped";
  std::string tokens = "token " + std::to_string(lost.first);
  if (lost.last > lost.first) {
    tokens = "tokens " + std::to_string(lost.first) + " to " + std::to_string(lost.last);
  }
  return tokens + " of sequence " + std::to_string(lost.n) +
         (lost.last > lost.first ? " are " : " is ") +
         (lost.kind == LostTokens::kAngles ? "turned to NaN" : "dropped");
}

}  // namespace tessera
