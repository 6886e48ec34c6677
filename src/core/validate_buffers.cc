// SPDX-License-Identifier: Apache-2.0
// validate(problem, buffers, device): pointers, scalars, overlap, and on the CPU the values of
// lengths and tables. Nothing here allocates while all is well.
#include <algorithm>
#include <cinttypes>
#include <cmath>

#include "core/dtype.h"
#include "core/overlap.h"
#include "core/philox.h"
#include "core/sequence.h"
#include "core/validate.h"

namespace tessera {
namespace {

Status check_scalars(const Problem& p, const Buffers& b) {
  if (b.num_threads < 0) {
    return invalid("num_threads=%d: must be 0 (the library's default) or more", b.num_threads);
  }
  if (has(p, TESSERA_SOFTMAX_SCALE) && !(std::isfinite(b.softmax_scale) && b.softmax_scale >= 0)) {
    return invalid(
        "softmax_scale=%g: must be finite and >= 0; leave it out for 1/sqrt(head_dim_qk)",
        b.softmax_scale);
  }
  if (has(p, TESSERA_SOFTCAP) && !(std::isfinite(b.softcap) && b.softcap > 0)) {
    return invalid("softcap=%g: must be finite and > 0; leave it out to turn it off", b.softcap);
  }
  if (has(p, TESSERA_DROPOUT) && dropout_threshold(b.dropout_p) == 0) {
    return invalid(
        "dropout_p=%g: must be in [0, 1), and p * 65536 must round to 1..65535, or be 0 "
        "for no dropout",
        b.dropout_p);
  }
  for (const int64_t field : b.reserved) {
    if (field != 0) {
      return invalid("buffers.reserved=%" PRId64 ": must be 0; zero the struct before filling it",
                     field);
    }
  }
  if (b.workspace_bytes < 0) {
    return invalid("workspace_bytes=%" PRId64 ": must be >= 0", b.workspace_bytes);
  }
  return {};
}

Status check_pointers(const Problem& p, const Buffers& b) {
  for (int i = 0; i < TESSERA_NUM_TENSORS; ++i) {
    const Tensor& t = p.tensor[i];
    if (t.dtype == TESSERA_NONE || element_count(t, tensor_rule(i).rank) == 0) continue;
    if (!b.data[i]) {
      return invalid("%s.data=NULL: must point to the elements of shape %s", name_of(p, i),
                     shape_text(p, i).c_str());
    }
    const auto address = reinterpret_cast<uintptr_t>(b.data[i]);
    if (address % static_cast<uintptr_t>(size_of(t.dtype)) != 0) {
      return invalid("%s.data=%p: must be a multiple of the element's %" PRId64
                     " bytes; pass an "
                     "aligned copy",
                     name_of(p, i), b.data[i], size_of(t.dtype));
    }
  }
  if (!has(p, TESSERA_SAME_LENGTHS)) return {};
  const bool packed = given(p, TESSERA_CU_SEQLENS_Q);
  const int q = packed ? TESSERA_CU_SEQLENS_Q : TESSERA_SEQLENS_Q;
  const int k = packed ? TESSERA_CU_SEQLENS_K : TESSERA_SEQLENS_K;
  if (b.data[q] == b.data[k]) return {};
  return invalid(
      "%s.data=%p: must be %s.data=%p, because TESSERA_SAME_LENGTHS says that they are "
      "one array; clear the flag for two",
      name_of(p, k), b.data[k], name_of(p, q), b.data[q]);
}

// The addresses of a tensor's first and past its last byte; where two such ranges cross, the exact
// footprints are compared.
struct Range {
  uint64_t begin, end;
  int index;  // TESSERA_NUM_TENSORS: the workspace
  bool output;
};

Footprint footprint_at(const Problem& p, const Buffers& b, int index) {
  if (index < TESSERA_NUM_TENSORS) {
    return footprint_of(p.tensor[index], tensor_rule(index).rank, b.data[index]);
  }
  const Tensor bytes{TESSERA_BOOL, 0, {b.workspace_bytes}, {1}};
  return footprint_of(bytes, 1, b.workspace);
}

Status check_overlap(const Problem& p, const Buffers& b) {
  Range ranges[TESSERA_NUM_TENSORS + 1];
  int count = 0;
  for (int i = 0; i < TESSERA_NUM_TENSORS; ++i) {
    if (!given(p, i)) continue;
    const uint64_t bytes = reach_in_bytes(p.tensor[i], tensor_rule(i).rank);
    if (bytes == 0) continue;
    const uint64_t begin = reinterpret_cast<uintptr_t>(b.data[i]);
    if (begin + bytes > uint64_t{INT64_MAX}) {
      return invalid("%s.data=%p: shape %s with these strides leaves the address space; check them",
                     name_of(p, i), b.data[i], shape_text(p, i).c_str());
    }
    ranges[count++] = {begin, begin + bytes, i, is_output(p, i)};
  }
  if (b.workspace && b.workspace_bytes > 0) {
    const uint64_t begin = reinterpret_cast<uintptr_t>(b.workspace);
    ranges[count++] = {begin, begin + static_cast<uint64_t>(b.workspace_bytes), TESSERA_NUM_TENSORS,
                       true};
  }
  for (int i = 0; i < count; ++i) {
    if (!ranges[i].output) continue;
    for (int j = 0; j < count; ++j) {
      const Range &a = ranges[i], &other = ranges[j];
      const bool seen = other.output && j <= i;  // pairs of outputs are looked at once
      if (seen || a.begin >= other.end || other.begin >= a.end) continue;
      if (!share_memory(footprint_at(p, b, a.index), footprint_at(p, b, other.index))) continue;
      const bool workspace = a.index == TESSERA_NUM_TENSORS || other.index == TESSERA_NUM_TENSORS;
      if (workspace) {
        return invalid("workspace=%p: shares memory with %s; pass a buffer of its own", b.workspace,
                       name_of(p, std::min(a.index, other.index)));
      }
      return invalid(
          "%s.data=%p: shares memory with %s; an output needs elements of its own, pass "
          "another buffer",
          name_of(p, a.index), b.data[a.index], name_of(p, other.index));
    }
  }
  return {};
}

// ---- values, read on the CPU only ----

struct LengthSide {
  int tensor, seqlens, cu_seqlens, padded;
  const char* max_name;
};
constexpr LengthSide kQuerySide{TESSERA_Q, TESSERA_SEQLENS_Q, TESSERA_CU_SEQLENS_Q,
                                TESSERA_CU_SEQLENS_Q_PADDED, "max_seqlen_q"};
constexpr LengthSide kKeySide{TESSERA_K, TESSERA_SEQLENS_K, TESSERA_CU_SEQLENS_K,
                              TESSERA_CU_SEQLENS_K_PADDED, "max_seqlen_k"};

Status check_seqlens(const Problem& p, const Buffers& b, int index, int64_t extent) {
  const int64_t batch = p.tensor[index].extent[0];
  for (int64_t n = 0; n < batch; ++n) {
    const int64_t length = length_at(p, b, index, n);
    if (length < 0 || length > extent) {
      return invalid("%s[%" PRId64 "]=%" PRId64 ": must be between 0 and the extent, %" PRId64,
                     name_of(p, index), n, length, extent);
    }
  }
  return {};
}

// tokens: of the packed buffer. max_seqlen: -1 when not given.
Status check_cu_seqlens(const Problem& p, const Buffers& b, const LengthSide& side, int64_t tokens,
                        int64_t max_seqlen) {
  const int64_t batch = p.tensor[side.cu_seqlens].extent[0] - 1;
  const char* name = name_of(p, side.cu_seqlens);
  const bool padded = given(p, side.padded);
  const int64_t first = length_at(p, b, side.cu_seqlens, 0);
  if (first != 0) return invalid("%s[0]=%" PRId64 ": must be 0", name, first);
  int64_t start = first;
  for (int64_t n = 0; n < batch; ++n) {
    const int64_t next = length_at(p, b, side.cu_seqlens, n + 1);
    if (next < start) {
      return invalid("%s[%" PRId64 "]=%" PRId64 ": must not be below %s[%" PRId64 "]=%" PRId64
                     "; offsets never decrease",
                     name, n + 1, next, name, n, start);
    }
    if (max_seqlen >= 0 && next - start > max_seqlen) {
      return invalid("%s=%" PRId64 ": must be at least every length, and sequence %" PRId64
                     " has %" PRId64,
                     side.max_name, max_seqlen, n, next - start);
    }
    start = next;
  }
  if (!padded) {
    if (start <= tokens) return {};
    return invalid(
        "%s[%" PRId64 "]=%" PRId64 ": must be at most the %" PRId64 " tokens of %s.shape=%s", name,
        batch, start, tokens, name_of(p, side.tensor), shape_text(p, side.tensor).c_str());
  }
  const char* stored = name_of(p, side.padded);
  int64_t free = 0;  // first row that the sequences so far leave free
  for (int64_t n = 0; n <= batch; ++n) {
    const int64_t at = length_at(p, b, side.padded, n);
    if (at < free) {
      return invalid("%s[%" PRId64 "]=%" PRId64 ": must be at least %" PRId64
                     ", where the sequence "
                     "before it ends",
                     stored, n, at, free);
    }
    if (at > tokens) {
      return invalid(
          "%s[%" PRId64 "]=%" PRId64 ": must be at most the %" PRId64 " tokens of %s.shape=%s",
          stored, n, at, tokens, name_of(p, side.tensor), shape_text(p, side.tensor).c_str());
    }
    if (n < batch) {
      free = at + length_at(p, b, side.cu_seqlens, n + 1) - length_at(p, b, side.cu_seqlens, n);
    }
  }
  return {};
}

Status check_lengths(const Problem& p, const Buffers& b, const LengthSide& side, int64_t extent,
                     int64_t max_seqlen) {
  if (given(p, side.seqlens)) return check_seqlens(p, b, side.seqlens, extent);
  if (given(p, side.cu_seqlens)) return check_cu_seqlens(p, b, side, extent, max_seqlen);
  return {};
}

// Entries of the pages that seqlens_k uses; those beyond may be anything.
Status check_pages(const Problem& p, const Buffers& b, int table, int64_t pages, const char* pool) {
  const Tensor& t = p.tensor[table];
  const int64_t page_size = p.tensor[TESSERA_K].extent[1];
  const auto* entries = static_cast<const int32_t*>(b.data[table]);
  for (int64_t n = 0; n < t.extent[0]; ++n) {
    const int64_t length = length_at(p, b, TESSERA_SEQLENS_K, n);
    for (int64_t j = 0; j * page_size < length; ++j) {
      const int32_t page = entries[offset_of(t, n, j)];
      if (page < 0 || page >= pages) {
        return invalid("%s[%" PRId64 ", %" PRId64
                       "]=%d: must be a page of %s, between 0 and %" PRId64,
                       name_of(p, table), n, j, page, pool, pages - 1);
      }
    }
  }
  return {};
}

Status check_page_tables(const Problem& p, const Buffers& b) {
  if (!is_paged(p)) return {};
  const int64_t pages_k = p.tensor[TESSERA_K].extent[0], pages_v = p.tensor[TESSERA_V].extent[0];
  const bool two = given(p, TESSERA_PAGE_TABLE_V);
  const bool k_smaller = pages_k <= pages_v;
  if (two) {
    TESSERA_RETURN_IF_ERROR(check_pages(p, b, TESSERA_PAGE_TABLE_V, pages_v, "v"));
    return check_pages(p, b, TESSERA_PAGE_TABLE_K, pages_k, "k");
  }
  return check_pages(p, b, TESSERA_PAGE_TABLE_K, k_smaller ? pages_k : pages_v,
                     k_smaller ? "k" : "v");
}

Status check_finite(const Problem& p, const Buffers& b, int index) {
  if (!given(p, index)) return {};
  const Tensor& t = p.tensor[index];
  const int64_t columns = tensor_rule(index).rank == 2 ? t.extent[1] : 1;
  for (int64_t i = 0; i < t.extent[0]; ++i) {
    for (int64_t j = 0; j < columns; ++j) {
      const double value = load_element(b.data[index], offset_of(t, i, j), t.dtype);
      if (!std::isfinite(value)) {
        return invalid("%s[%" PRId64 "]=%g: must be finite", name_of(p, index),
                       columns == 1 ? i : j, value);
      }
    }
  }
  return {};
}

Status check_values(const Problem& p, const Buffers& b) {
  const Sizes s = sizes_of(p);
  TESSERA_RETURN_IF_ERROR(
      check_lengths(p, b, kQuerySide, s.sq, has(p, TESSERA_MAX_SEQLEN_Q) ? p.max_seqlen_q : -1));
  TESSERA_RETURN_IF_ERROR(
      check_lengths(p, b, kKeySide, s.sk, has(p, TESSERA_MAX_SEQLEN_K) ? p.max_seqlen_k : -1));
  TESSERA_RETURN_IF_ERROR(check_page_tables(p, b));
  TESSERA_RETURN_IF_ERROR(check_finite(p, b, TESSERA_SINK));
  return check_finite(p, b, TESSERA_ALIBI_SLOPES);
}

}  // namespace

Status validate(const Problem& problem, const Buffers& buffers, const Device& device) {
  TESSERA_RETURN_IF_ERROR(check_scalars(problem, buffers));
  TESSERA_RETURN_IF_ERROR(check_pointers(problem, buffers));
  TESSERA_RETURN_IF_ERROR(check_overlap(problem, buffers));
  return device.kind == TESSERA_CPU ? check_values(problem, buffers) : Status();
}

}  // namespace tessera
