// SPDX-License-Identifier: Apache-2.0
// Extents and strides of a case's tensors, and which of them share a buffer.
#include <algorithm>
#include <utility>

#include "core/case/builder.h"
#include "core/case/draw.h"

namespace tessera {

// Draws of kDrawStarts: n for q, b + n for k, in 0..s; of kDrawShift: n, in -sq..sk; of kDrawWindows:
// 2 n for the left side and 2 n + 1 for the right one, in -1..min(s, 60).
void Builder::resolve_positions() {
  const auto resolve = [&](const CaseLengths& starts, int64_t s, uint64_t first_draw) {
    std::vector<int64_t> out = starts.list;
    for (int64_t n = 0; starts.kind == CaseLengths::Kind::kRandom && n < c_.b; ++n) {
      out.push_back(draw_integer(starts.seed, kDrawStarts, first_draw + n, s + 1));
    }
    return PerSequence(std::move(out));
  };
  g_.position_q = resolve(c_.q_start, c_.sq, 0);
  g_.position_k = resolve(c_.k_start, c_.sk, c_.b);
  // A packed side's dense masks and biases reach as far as its sequences do.
  extent_q_ = c_.sq, extent_k_ = paged_ ? (Count{max_pages_} * c_.page).value() : c_.sk;
  for (int64_t n = 0; n < g_.position_q.size(); ++n)
    extent_q_ = std::max(extent_q_, g_.dense_start_q(n) + g_.len_q[n]);
  for (int64_t n = 0; n < g_.position_k.size(); ++n)
    extent_k_ = std::max(extent_k_, g_.dense_start_k(n) + g_.len_k[n]);
  std::vector<int64_t> shift;
  for (int64_t n = 0; c_.shift.kind == CaseShift::Kind::kRandom && n < c_.b; ++n) {
    shift.push_back(
        draw_integer(static_cast<uint32_t>(c_.shift.value), kDrawShift, n, c_.sq + c_.sk + 1) -
        c_.sq);
  }
  g_.shift = PerSequence(std::move(shift));
  std::vector<int64_t> windows;
  for (int64_t n = 0; c_.has_windows && n < c_.b; ++n) {
    constexpr int64_t kMostSide = 60;
    for (const uint64_t side : {0, 1}) {
      const int64_t most = std::min(side == 0 ? c_.sk : c_.sq, kMostSide);
      windows.push_back(draw_integer(c_.windows_seed, kDrawWindows, 2 * n + side, most + 2) - 1);
    }
  }
  g_.windows = PerSequence(std::move(windows));
}

void Builder::place_positions() {
  const int32_t type = c_.int64_lengths ? TESSERA_INT64 : TESSERA_INT32;
  const int64_t step = c_.strided ? 2 : 1;
  const auto place = [&](bool there, int index) {
    if (there) place_dense(index, type, {c_.b}, true, step);
  };
  place(c_.q_start.kind != CaseLengths::Kind::kAbsent, TESSERA_Q_START);
  place(c_.k_start.kind != CaseLengths::Kind::kAbsent, TESSERA_K_START);
  place(c_.shift.kind == CaseShift::Kind::kRandom, TESSERA_SHIFT);
  if (c_.has_windows) place_dense(TESSERA_WINDOWS, type, {c_.b, 2}, true, step);
}

// Scales of fp8 tensors, and the largest values of outputs. kvscale= gives k and v more scales than
// the one of each head that they have without it.
void Builder::place_rounding() {
  Problem& p = g_.problem;
  const auto fp8 = [&](int index) { return is_fp8(p.tensor[index].dtype); };
  if (fp8(TESSERA_Q)) place_scale(TESSERA_Q_SCALE, c_.q_scale, c_.hq, c_.sq, kCaseScaleRows);
  if (fp8(TESSERA_DO)) place_scale(TESSERA_DO_SCALE, c_.q_scale, c_.hq, c_.sq, kCaseScaleRows);
  for (const int index : {TESSERA_K_SCALE, TESSERA_V_SCALE}) {
    if (fp8(TESSERA_K)) place_scale(index, c_.kv_scale, c_.hk, extent_k_, kCaseScaleKeys);
  }
  if (given(p, TESSERA_Q_SCALE) && c_.q_scale == CaseScale::kFine) {
    p.q_scale_block = kCaseScaleRows;
    if (thd_q_) p.flags |= TESSERA_MAX_SEQLEN_Q, p.max_seqlen_q = c_.sq;
  }
  if (given(p, TESSERA_K_SCALE) && c_.kv_scale == CaseScale::kFine) {
    p.k_scale_block = kCaseScaleKeys;
    if (thd_k_) p.flags |= TESSERA_MAX_SEQLEN_K, p.max_seqlen_k = c_.sk;
  }
  if (is_fp8(c_.o_dtype)) place_dense(TESSERA_O_SCALE, TESSERA_FP32, {1}, false);
  for (int index = TESSERA_DQ_SCALE; is_fp8(c_.grad_dtype) && index <= TESSERA_DV_SCALE; ++index) {
    place_dense(index, TESSERA_FP32, {1}, false);
  }
  if (!c_.amax) return;
  for (int index = backward_ ? TESSERA_AMAX_DQ : TESSERA_AMAX_O;
       index <= (backward_ ? TESSERA_AMAX_DV : TESSERA_AMAX_O); ++index) {
    place_dense(index, TESSERA_FP32, {1}, false);
  }
}

void Builder::place_scale(int index, CaseScale scale, int64_t heads, int64_t rows, int64_t block) {
  if (scale == CaseScale::kNone) return;
  const bool fine = scale == CaseScale::kFine;
  place_dense(index, TESSERA_FP32,
              {fine ? c_.b : 1, scale == CaseScale::kOne ? 1 : heads,
               fine ? (rows + block - 1) / block : 1},
              false);
}

// Inputs whose batches or heads are one memory, read again and again. Keys of a pool and packed
// tokens have no batch to share, only heads.
void Builder::expand_inputs() {
  const auto expand = [&](int index, int axis) {
    Tensor& t = g_.problem.tensor[index];
    if (t.dtype != TESSERA_NONE && t.extent[axis] > 1) t.stride[axis] = 0;
  };
  for (int index : {TESSERA_Q, TESSERA_DO, TESSERA_V}) expand(index, 2);
  if (!paged_) expand(TESSERA_K, 0);
  for (int index : {TESSERA_DLSE, TESSERA_SEGMENT_IDS_Q, TESSERA_KEY_RANGES}) expand(index, 0);
  expand(TESSERA_ALIBI_SLOPES, 1);
  expand(TESSERA_SINK, 0);
}

// [b, hq, sq]; forward writes it contiguous.
void Builder::place_row_statistics(int index, bool output) {
  place_dense(index, statistic_, {batch_q_, c_.hq, rows_q_}, !output,
              output || !c_.strided ? 1 : 2);
}

void Builder::place_rows(std::initializer_list<Part> parts, int32_t format, int64_t batch,
                         int64_t rows, Join join) {
  const int owner = parts.begin()->index;
  const int64_t count = static_cast<int64_t>(parts.size());
  Count row = 0;  // elements of a token (bhsd: of a sequence) so far, all parts
  for (const Part& part : parts) {
    Tensor& t = tensor(part.index, part.dtype);
    const int64_t extent[4] = {batch, rows, part.heads, part.dim};
    std::copy(extent, extent + 4, t.extent);
    t.stride[3] = 1;
    g_.owner[part.index] = owner;
    g_.offset[part.index] = row.value();
    Count head = apart(part.dim), taken = part.heads * head;
    if (format == TESSERA_BHSD) {
      t.stride[1] = head.value();
      head = apart(rows * head);
      taken = part.heads * head;
    } else if (join == Join::kAfterHeads && count > 1) {
      head = apart(Count{count} * part.dim);
      taken = part.dim;
    }
    t.stride[2] = head.value();
    row += taken;
  }
  if (join == Join::kAfterHeads && count > 1) row = parts.begin()->heads * apart(row);
  row = apart(row);
  for (const Part& part : parts) {
    Tensor& t = g_.problem.tensor[part.index];
    switch (format) {
      case TESSERA_BHSD:
        t.stride[0] = row.value();
        break;
      case TESSERA_SBHD:
        t.stride[0] = row.value();
        t.stride[1] = apart(batch * row).value();
        break;
      default:
        t.stride[1] = row.value();
        t.stride[0] = apart(rows * row).value();
        break;
    }
  }
}

// [pages, page_size, hk, d]; with sbhd the page axis lies inside the token axis.
void Builder::place_pool(int index, int32_t dtype, int64_t pages, int64_t dim) {
  const int32_t format = c_.layout.format_kv == TESSERA_THD ? TESSERA_BSHD : c_.layout.format_kv;
  place_rows({{index, dtype, c_.hk, dim}}, format, pages, c_.page, Join::kBeforeHeads);
}

void Builder::place_dense(int index, int32_t dtype, std::initializer_list<int64_t> extent,
                          bool pad_rows, int64_t last_stride) {
  Tensor& t = tensor(index, dtype);
  std::fill(t.extent, t.extent + 4, 1);
  std::copy(extent.begin(), extent.end(), t.extent);
  Count stride = last_stride;
  for (int axis = 3; axis >= 0; --axis) {
    if (axis >= static_cast<int>(extent.size())) continue;
    t.stride[axis] = stride.value();
    stride *= t.extent[axis];
    if (pad_rows) stride = apart(stride);
  }
}

// A bias or mask. Axes without a letter have extent 1; with strided they are expanded instead, but
// for the query axis of a mask of keys, which would lose its meaning.
void Builder::place_broadcast(int index, int32_t dtype, const std::string& letters) {
  const int64_t full[4] = {c_.b, c_.hq, extent_q_, extent_k_};
  int64_t extent[4];
  bool has[4];
  for (int axis = 0; axis < 4; ++axis) {
    has[axis] = letters.find("bhqk"[axis]) != std::string::npos;
    extent[axis] = has[axis] ? full[axis] : 1;
  }
  place_dense(index, dtype, {extent[0], extent[1], extent[2], extent[3]}, true);
  Tensor& t = g_.problem.tensor[index];
  for (int axis = 0; axis < 4; ++axis) {
    if (!c_.strided || has[axis] || (index == TESSERA_MASK && axis == 2)) continue;
    t.extent[axis] = full[axis];
    t.stride[axis] = 0;
  }
}

}  // namespace tessera
