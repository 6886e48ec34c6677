// SPDX-License-Identifier: Apache-2.0
// validate(problem, buffers, device): pointers, scalars, overlap, and on the CPU the values of
// lengths and tables. Nothing here allocates while all is well.
#include <algorithm>
#include <cinttypes>
#include <cmath>

#include "core/mask/philox.h"
#include "core/mask/sequence.h"
#include "core/problem/dtype.h"
#include "core/problem/scales.h"
#include "core/validate/overlap.h"
#include "core/validate/validate.h"
#include "core/validate/values.h"

namespace tessera {
namespace {

Status check_scalars(const Problem& p, const Buffers& b) {
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
  if (has(p, TESSERA_V_IN_K) && b.data[TESSERA_V] != b.data[TESSERA_K]) {
    return invalid(
        "v.data=%p: must be k.data=%p, because TESSERA_V_IN_K says that v begins where k "
        "begins; clear the flag for two tensors",
        b.data[TESSERA_V], b.data[TESSERA_K]);
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

// The elements of lengths and tables, which only the CPU can read.
Status check_values(const Problem& p, const Buffers& b) {
  const ValueRules rules(p, b);
  BadValue bad;
  for (int r = 0; r < rules.count; ++r) {
    for (int64_t item = 0; item < rules.rule[r].items; ++item) {
      if (breaks(rules, r, item, &bad)) return refuse(p, rules.rule[r], bad);
    }
  }
  return {};
}

Status check_scale(const Problem& p, int index, double scale) {
  if (std::isfinite(scale) && scale > 0) return {};
  return invalid("%s=%g: a scale must be finite and > 0; 1 leaves values as they are",
                 name_of(p, index), scale);
}

// Every sequence and head has a scale that must be legal or, where rows share scales by blocks,
// one for each block that holds a row inside the sequence. What is expanded is read once.
Status check_scales_of_heads(const Problem& p, const Buffers& b, int index) {
  const Tensor& t = p.tensor[index];
  const bool keys = index == TESSERA_K_SCALE || index == TESSERA_V_SCALE;
  const int64_t block = keys ? p.k_scale_block : p.q_scale_block;
  const int64_t sequences = distinct_sequences(p);  // as to their rows
  const auto rows_of = [&](int64_t n) {
    const Sequence sequence = sequence_of(p, b, n);
    return keys ? sequence.len_k() : sequence.len_q();
  };
  // Sequences that share their scales read as many as the longest of them.
  const bool shared = distinct(t, 0) <= 1;
  int64_t longest = sizes_of(p).batch > 0 ? 1 : 0;
  if (block > 0 && (shared || sequences <= 1)) {
    longest = 0;
    for (int64_t n = 0; n < sequences; ++n) longest = std::max(longest, rows_of(n));
  }
  const bool each_its_rows = block > 0 && !shared && sequences > 1;
  for (int64_t n = 0; n < (shared ? 1 : t.extent[0]); ++n) {
    int64_t rows = each_its_rows ? rows_of(n) : longest;
    if (distinct(t, 2) <= 1) rows = std::min<int64_t>(rows, 1);
    for (int64_t h = 0; h < distinct(t, 1); ++h) {
      for (int64_t i = 0; i < rows; i += std::max<int64_t>(block, 1)) {
        TESSERA_RETURN_IF_ERROR(check_scale(p, index, scale_at(p, b, index, n, h, i)));
      }
    }
  }
  return {};
}

Status check_scales(const Problem& p, const Buffers& b) {
  for (const int index : {TESSERA_K_SCALE, TESSERA_V_SCALE, TESSERA_Q_SCALE, TESSERA_DO_SCALE,
                          TESSERA_O_SCALE, TESSERA_DQ_SCALE, TESSERA_DK_SCALE, TESSERA_DV_SCALE}) {
    if (!given(p, index)) continue;
    TESSERA_RETURN_IF_ERROR(tensor_rule(index).rank == 3
                                ? check_scales_of_heads(p, b, index)
                                : check_scale(p, index, scale_at(p, b, index, 0, 0, 0)));
  }
  return {};
}

}  // namespace

Status validate_context(const Buffers& b) {
  if (b.num_threads < 0) {
    return invalid("num_threads=%d: must be 0 (the library's default) or more", b.num_threads);
  }
  if (b.sm_margin < 0) {
    return invalid("sm_margin=%d: must be 0 (none) or more multiprocessors", b.sm_margin);
  }
  const int64_t half[] = {b.reserved_half};
  TESSERA_RETURN_IF_ERROR(check_reserved("buffers.reserved_half", half));
  TESSERA_RETURN_IF_ERROR(check_reserved("buffers.reserved", b.reserved));
  if (b.workspace_bytes >= 0) return {};
  return invalid("workspace_bytes=%" PRId64 ": must be >= 0", b.workspace_bytes);
}

Status validate(const Problem& problem, const Buffers& buffers, const Device& device) {
  TESSERA_RETURN_IF_ERROR(validate_context(buffers));
  TESSERA_RETURN_IF_ERROR(check_scalars(problem, buffers));
  TESSERA_RETURN_IF_ERROR(check_pointers(problem, buffers));
  TESSERA_RETURN_IF_ERROR(check_overlap(problem, buffers));
  if (device.kind != TESSERA_CPU) return {};
  TESSERA_RETURN_IF_ERROR(check_values(problem, buffers));
  return check_scales(problem, buffers);
}

}  // namespace tessera
