// SPDX-License-Identifier: Apache-2.0
// sizes_of(): b, s, h and d, which TransformerEngine's tensors say in several ways.
#include <cinttypes>

#include "nvte/call.h"

namespace tessera::nvte {
namespace {

// Heads and head dim of q, k or v, and the tokens of all its sequences (or pages).
struct Extents {
  int64_t tokens, h, d;
};
Extents extents_of(const Tensor& tensor, const char* name, bool bhsd) {
  const int64_t n = tensor.ndim();
  if (bhsd ? n != 4 : n != 3 && n != 4) {
    fail("%s.shape=%s: must be %s", name, shape_text(tensor).c_str(),
         bhsd ? "[b, h, s, d]" : "[.., h, d], with one or two axes of tokens");
  }
  if (bhsd) return {tensor.extent(0) * tensor.extent(2), tensor.extent(1), tensor.extent(3)};
  return {tensor.numel(0, n - 2), tensor.extent(n - 2), tensor.extent(n - 1)};
}

// Sequences of the batch, as cu_seqlens_q says, or q where that is empty.
int64_t batch_of(const Arguments& a, const Layout& layout) {
  const Tensor& cu = *a.cu_seqlens_q;
  if (cu.numel() > 0) return cu.numel() - 1;
  if (layout.q != NVTE_THD && a.q->ndim() == 4) return a.q->extent(layout.q == NVTE_SBHD ? 1 : 0);
  fail("cu_seqlens_q.shape=%s: must be [b + 1], which says how many sequences Q.shape=%s holds",
       shape_text(cu).c_str(), shape_text(*a.q).c_str());
}

// A padded side holds b sequences of max_seqlen tokens.
void check_padded(const Tensor& tensor, const char* name, const Extents& extents,
                  NVTE_QKV_Format format, int64_t b, int64_t s, const char* max_name) {
  bool right = extents.tokens == b * s;
  if (tensor.ndim() == 4) {
    const bool sbhd = format == NVTE_SBHD, bhsd = format == NVTE_BHSD;
    right = tensor.extent(sbhd ? 1 : 0) == b && tensor.extent(bhsd ? 2 : sbhd ? 0 : 1) == s;
  }
  if (right) return;
  fail("%s.shape=%s: must hold b=%" PRId64 " sequences of %s=%" PRId64
       " tokens; pass the extent that the buffer has, and shorter lengths as cu_seqlens under a "
       "padding mask",
       name, shape_text(tensor).c_str(), b, max_name, s);
}

}  // namespace

Sizes sizes_of(const Arguments& a) {
  const Layout& layout = layout_of(a.layout, "qkv_layout");
  for (const size_t longest : {a.max_seqlen_q, a.max_seqlen_kv}) {
    if (longest > INT32_MAX) fail("max_seqlen=%zu: must be below 2^31", longest);
  }
  Sizes s{};
  const bool bhsd = layout.group == NVTE_SD_SD_SD;
  const Extents q = extents_of(*a.q, "Q", bhsd), k = extents_of(*a.k, "K", bhsd),
                v = extents_of(*a.v, "V", bhsd);
  const auto max_q = static_cast<int64_t>(a.max_seqlen_q),
             max_kv = static_cast<int64_t>(a.max_seqlen_kv);
  s.b = batch_of(a, layout);
  s.hq = q.h, s.hk = k.h, s.dqk = q.d, s.dv = v.d;
  s.sq = layout.q == NVTE_THD ? q.tokens : max_q;
  if (layout.q != NVTE_THD) check_padded(*a.q, "Q", q, layout.q, s.b, max_q, "max_seqlen_q");
  if (v.h != k.h) {
    fail("V.shape=%s: must have the heads of K.shape=%s", shape_text(*a.v).c_str(),
         shape_text(*a.k).c_str());
  }
  if (is_paged(layout)) {
    const int page = layout.kv == NVTE_SBHD ? 1 : 0;
    if (a.k->ndim() != 4 || a.v->ndim() != 4 || a.page_table_k->ndim() != 2) {
      fail(
          "K.shape=%s, V.shape=%s, page_table_k.shape=%s: pages need pools of 4 axes, [pages, "
          "page_size, h, d] or [page_size, pages, h, d], and a table [b, max_pages]",
          shape_text(*a.k).c_str(), shape_text(*a.v).c_str(), shape_text(*a.page_table_k).c_str());
    }
    s.pages_k = a.k->extent(page), s.pages_v = a.v->extent(page);
    s.page_size = a.k->extent(1 - page);
    if (a.v->extent(1 - page) != s.page_size) {
      fail("V.shape=%s: must have the page size of K, %" PRId64, shape_text(*a.v).c_str(),
           s.page_size);
    }
    s.max_pages = a.page_table_k->extent(1);
    s.sk = s.max_pages * s.page_size;
    return s;
  }
  if (v.tokens != k.tokens) {
    fail("V.shape=%s: must have the tokens of K.shape=%s", shape_text(*a.v).c_str(),
         shape_text(*a.k).c_str());
  }
  s.sk = layout.kv == NVTE_THD ? k.tokens : max_kv;
  if (layout.kv != NVTE_THD) check_padded(*a.k, "K", k, layout.kv, s.b, max_kv, "max_seqlen_kv");
  return s;
}

}  // namespace tessera::nvte
