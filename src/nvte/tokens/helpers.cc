// SPDX-License-Identifier: Apache-2.0
// Random state, segments, and copies between packed, padded and paged keys and values.
#include <algorithm>
#include <atomic>
#include <cinttypes>
#include <cstring>
#include <vector>

#include "nvte/tokens/arguments.h"

namespace tessera::nvte {
namespace {

// Rows [h, d] of two tensors, which must have the same, and their pieces.
Rows rows_of(const Tensor& a, const Tensor& b, const char* names) {
  const int64_t n = a.ndim(), m = b.ndim(), bytes = a.numel(n - 2, n) * bytes_of(a.dtype());
  if (a.dtype() != b.dtype() || a.extent(n - 2) != b.extent(m - 2) ||
      a.extent(n - 1) != b.extent(m - 1) || bytes_of(a.dtype()) == 0) {
    fail("%s: shapes %s and %s, dtypes %d and %d: must have the same heads, head dim and dtype",
         names, shape_text(a).c_str(), shape_text(b).c_str(), static_cast<int>(a.dtype()),
         static_cast<int>(b.dtype()));
  }
  return pieces_of(bytes, a.data(), b.data());
}

void check_positive(int value, const char* name) {
  if (value <= 0) fail("%s=%d: must be positive", name, value);
}

struct Cache {
  NVTETensor new_k, new_v, k_cache, v_cache, page_table, cu_new_lens, cu_cached_lens;
  NVTE_QKV_Format format;
  int64_t b, max_ctx_len, max_seq_len, max_pages;
  bool paged;
};

AppendJob append_of(const Cache& c, NVTETensor from, NVTETensor cache, const char* name) {
  const bool packed = c.format == NVTE_THD, sbhd = c.format == NVTE_SBHD;
  if (!packed && !sbhd && c.format != NVTE_BSHD) {
    fail("qkv_format=%d: must be NVTE_SBHD (0), NVTE_BSHD (1) or NVTE_THD (2)",
         static_cast<int>(c.format));
  }
  const Tensor &source = with_data(from, name, packed ? 3 : 4),
               &target = with_data(cache, "cache", 4);
  AppendJob job{};
  job.from = static_cast<const char*>(source.data());
  job.cache = static_cast<char*>(target.data());
  job.rows = rows_of(source, target, name);
  job.new_lens = integers(c.cu_new_lens, "cu_new_lens", c.b + 1);
  job.cached_lens = integers(c.cu_cached_lens, "cu_cached_lens", c.b + 1);
  job.b = c.b, job.packed = packed;
  job.page_size = c.max_seq_len / c.max_pages, job.max_pages = c.max_pages;
  job.num_pages = target.extent(0);
  job.tokens = source.numel(0, source.ndim() - 2);
  // No sequence has more tokens than there are, whatever the caller's bound.
  job.at_once = std::clamp<int64_t>(job.tokens, 1, c.max_ctx_len);
  if (!packed) {
    if (source.extent(sbhd ? 1 : 0) != c.b) {
      fail("%s.shape=%s: must hold b=%" PRId64 " sequences", name, shape_text(source).c_str(), c.b);
    }
    job.extent_s = source.extent(sbhd ? 0 : 1);
    job.stride_b = sbhd ? 1 : job.extent_s, job.stride_s = sbhd ? source.extent(1) : 1;
  }
  const Integers table = integers(c.page_table, "page_table", c.b * c.max_pages);
  if (table.wide) fail("page_table.dtype=%d: must be kNVTEInt32", kNVTEInt64);
  job.page_table = static_cast<const int32_t*>(table.data), job.paged = c.paged;
  if (target.extent(1) != job.page_size) {
    fail("cache.shape=%s: must have %" PRId64 " tokens in a row: max_seq_len / max_pages_per_seq",
         shape_text(target).c_str(), job.page_size);
  }
  return job;
}

// On the host, before anything is written.
void check_places(const AppendJob& job) {
  for (int64_t n = 0; n < job.b; ++n) {
    for (int64_t i = 0; i < job.new_lens.length(n); ++i) {
      if (job.place(n, i) >= 0) continue;
      fail(
          "cu_new_lens: token %" PRId64 " of sequence %" PRId64
          " has no place: it must be a row of new_k and new_v, cached tokens + new ones must be at "
          "most max_seq_len=%" PRId64 ", and entries of page_table below %" PRId64,
          i, n, job.page_size * job.max_pages, job.num_pages);
    }
  }
}

// Likewise: rows move up only, as sequences before them end.
void check_rows(const ReindexJob& job) {
  for (int64_t n = 0; n < job.b; ++n) {
    if (job.old(n) <= 0 || (job.was[n] >= n && job.was[n] < job.max_rows)) continue;
    fail("page_table[%" PRId64 "]=%d: must be the row of the caches that sequence %" PRId64
         " was in, from %" PRId64 " up and below %" PRId64,
         n, job.was[n], n, n, job.max_rows);
  }
}

void copy_to_cache(const Cache& c, cudaStream_t stream) {
  const AppendJob appends[] = {append_of(c, c.new_k, c.k_cache, "new_k"),
                               append_of(c, c.new_v, c.v_cache, "new_v")};
  const tessera_device device = device_of(appends[0].cache);
  ReindexJob moves[2]{};
  for (int i = 0; i < 2; ++i) {
    const AppendJob& job = appends[i];
    moves[i] = {job.cache,      job.rows, job.new_lens,  job.cached_lens,
                job.page_table, c.b,      job.num_pages, c.max_seq_len};
    if (is_cuda(device)) continue;
    check_places(job);
    if (!c.paged) check_rows(moves[i]);
  }
  for (int i = 0; i < 2; ++i) {
    if (!c.paged) run(moves[i], device, stream);
    run(appends[i], device, stream);
  }
}

// tensor and new_tensor are as they stand in the arguments of both conversions.
void convert(NVTETensor tensor, NVTETensor cu_seqlens, NVTETensor new_tensor, bool to_packed,
             cudaStream_t stream) {
  const Tensor& from = with_data(tensor, "tensor", to_packed ? 4 : 3);
  const Tensor& to = with_data(new_tensor, "new_tensor", to_packed ? 3 : 4);
  const Tensor &packed = to_packed ? to : from, &padded = to_packed ? from : to;
  ConvertJob job{static_cast<const char*>(from.data()),
                 static_cast<char*>(to.data()),
                 rows_of(from, to, "tensor, new_tensor"),
                 {},
                 padded.extent(0),
                 padded.extent(1),
                 packed.extent(0),
                 to_packed};
  job.cu_seqlens = integers(cu_seqlens, "cu_seqlens", job.b + 1);
  const tessera_device device = device_of(job.to);
  for (int64_t n = 0; n < job.b && !is_cuda(device); ++n) {
    const int64_t start = job.cu_seqlens[n], length = job.cu_seqlens.length(n);
    if (length >= 0 && length <= job.max_seq_len && start >= 0 && start <= job.tokens &&
        length <= job.tokens - start)
      continue;
    fail("cu_seqlens[%" PRId64 "..]=%" PRId64 ", %" PRId64 ": must not fall, be at most t=%" PRId64
         ", and hold at most max_seq_len=%" PRId64 " tokens",
         n, start, job.cu_seqlens[n + 1], job.tokens, job.max_seq_len);
  }
  run(job, device, stream);
}

}  // namespace
}  // namespace tessera::nvte

using namespace tessera::nvte;

void tessera_nvte_populate_rng_state_async(NVTETensor rng_state_dst, const NVTETensor seed,
                                           size_t /*q_max_seqlen*/, size_t /*kv_max_seqlen*/,
                                           NVTE_Fused_Attn_Backend /*backend*/,
                                           cudaStream_t stream) {
  named("nvte_populate_rng_state_async", [&] {
    static std::atomic<int64_t> next{0};
    const Tensor &state = tensor_of(rng_state_dst, "rng_state_dst"),
                 &from = tensor_of(seed, "seed");
    if (state.dtype() != kNVTEInt64 || state.numel() < 2 || !state.data()) {
      fail("rng_state_dst.shape=%s, dtype=%d: must be kNVTEInt64 [2], with memory",
           shape_text(state).c_str(), static_cast<int>(state.dtype()));
    }
    if (from.numel() * bytes_of(from.dtype()) < 8 || !from.data()) {
      fail("seed.shape=%s: must have 8 bytes or more", shape_text(from).c_str());
    }
    auto* const words = static_cast<int64_t*>(state.data());
    run(RngStateJob{words, static_cast<const int64_t*>(from.data()), nullptr, 0, next++, 0},
        device_of(words), stream);
  });
}

void tessera_nvte_extract_seed_and_offset(int64_t* rng_state_ptr, int captured, int64_t* seed_ptr,
                                          uint64_t seed_val, int64_t* offset_ptr,
                                          uint64_t offset_val, uint32_t offset_intragraph,
                                          cudaStream_t stream) {
  named("nvte_extract_seed_and_offset", [&] {
    if (!rng_state_ptr || (captured && (!seed_ptr || !offset_ptr))) {
      fail(
          "rng_state_ptr=%p, seed_ptr=%p, offset_ptr=%p: must not be null (the last two where "
          "captured=%d is not 0)",
          static_cast<void*>(rng_state_ptr), static_cast<void*>(seed_ptr),
          static_cast<void*>(offset_ptr), captured);
    }
    run(RngStateJob{rng_state_ptr, captured ? seed_ptr : nullptr, captured ? offset_ptr : nullptr,
                    static_cast<int64_t>(seed_val), static_cast<int64_t>(offset_val),
                    captured ? static_cast<int64_t>(offset_intragraph) : 0},
        device_of(rng_state_ptr), stream);
  });
}

uint32_t tessera_nvte_get_runtime_num_segments(NVTETensor cu_seqlen, NVTETensor /*workspace*/,
                                               size_t len, cudaStream_t stream) {
  return named("nvte_get_runtime_num_segments", [&] {
    const auto count = static_cast<int64_t>(
        std::min<size_t>(len, static_cast<size_t>(tensor_of(cu_seqlen, "cu_seqlen").numel())));
    Integers entries = integers(cu_seqlen, "cu_seqlen", count);
    std::vector<int64_t> copy(static_cast<size_t>(count));
    to_host(copy.data(), entries.data, count * (entries.wide ? 8 : 4), device_of(entries.data),
            stream);
    entries.data = copy.data();
    uint32_t segments = 0;
    for (int64_t i = 0; i < count; ++i) segments += entries[i] > 0;
    return segments;
  });
}

void tessera_nvte_copy_to_kv_cache(NVTETensor new_k, NVTETensor new_v, NVTETensor k_cache,
                                   NVTETensor v_cache, NVTETensor page_table,
                                   NVTETensor cu_new_lens, NVTETensor cu_cached_lens,
                                   NVTE_QKV_Format qkv_format, int b, int max_ctx_len,
                                   int max_seq_len, int max_pages_per_seq, int is_non_paged,
                                   cudaStream_t stream) {
  named("nvte_copy_to_kv_cache", [&] {
    check_positive(b, "b");
    check_positive(max_ctx_len, "max_ctx_len");
    check_positive(max_seq_len, "max_seq_len");
    check_positive(max_pages_per_seq, "max_pages_per_seq");
    copy_to_cache(
        {new_k, new_v, k_cache, v_cache, page_table, cu_new_lens, cu_cached_lens, qkv_format, b,
         max_ctx_len, max_seq_len, is_non_paged ? 1 : max_pages_per_seq, !is_non_paged},
        stream);
  });
}

void tessera_nvte_convert_thd_to_bshd(NVTETensor tensor, NVTETensor cu_seqlens,
                                      NVTETensor new_tensor, int /*b*/, int /*max_seq_len*/,
                                      cudaStream_t stream) {
  named("nvte_convert_thd_to_bshd",
        [&] { convert(tensor, cu_seqlens, new_tensor, false, stream); });
}

void tessera_nvte_convert_bshd_to_thd(NVTETensor tensor, NVTETensor cu_seqlens,
                                      NVTETensor new_tensor, int /*t*/, cudaStream_t stream) {
  named("nvte_convert_bshd_to_thd", [&] { convert(tensor, cu_seqlens, new_tensor, true, stream); });
}
