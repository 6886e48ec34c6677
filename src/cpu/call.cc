// SPDX-License-Identifier: Apache-2.0
#include "cpu/call.h"

#include <limits>

#include "core/mask/sequence.h"
#include "core/problem/problem.h"
#include "cpu/simd/kernels.h"

namespace tessera::cpu {
namespace {

Pages pages_of(const Problem& problem, const Buffers& buffers, int pool, int table) {
  const Strided t = strided_of(problem, buffers, table);
  return {t.data, {t.stride[0], t.stride[1]}, problem.tensor[pool].extent[1]};
}

void fill_sequences(const Problem& problem, const Buffers& buffers, int64_t batch,
                    CallSequence* sequences) {
  for (int64_t n = 0; n < batch; ++n) {
    const Sequence s = sequence_of(problem, buffers, n);
    sequences[n] = {s.n,
                    s.first_q,
                    s.first_k,
                    s.batch_q,
                    s.batch_k,
                    s.q_start,
                    s.k_start,
                    is_thd_q(problem) ? s.q_start : 0,
                    is_thd_k(problem) ? s.k_start : 0,
                    s.band};
  }
}

void fill_score(const Problem& problem, const Buffers& buffers, Call& call) {
  const double scale = softmax_scale_of(problem, buffers);
  call.softmax_scale = static_cast<float>(scale);
  call.scale_log2 = static_cast<float>(scale * 1.4426950408889634);
  call.score_unit = is_backward(problem) ? 1.0f : kLog2e;
  call.score_scale = is_backward(problem) ? call.softmax_scale : call.scale_log2;
  call.softcap = static_cast<float>(softcap_of(problem, buffers));
  call.bias = strided_of(problem, buffers, TESSERA_BIAS);
  call.bias_ahead = is_backward(problem) ? 0 : kernels().block * call.bias.stride[3];
  call.bias_pre_scale = has(problem, TESSERA_BIAS_PRE_SCALE);
  call.slopes = strided_of(problem, buffers, TESSERA_ALIBI_SLOPES);
  // The maximum must be rounded as the scores are if the scale is large: scale s - m in one
  // rounding would leave what m lost, and exp2 overflow. A subnormal scale is 0 to the kernels,
  // which -inf must not meet.
  const bool plain = call.softcap == 0 && !call.bias.data && !call.slopes.data;
  constexpr float kLeast = std::numeric_limits<float>::min();
  call.raw = plain && call.softmax_scale >= kLeast && call.scale_log2 <= 64;
}

void fill_visibility(const Problem& problem, const Buffers& buffers, Call& call) {
  call.mask = strided_of(problem, buffers, TESSERA_MASK);
  call.mask_hides = has(problem, TESSERA_MASK_DROP) ? 1 : 0;
  call.mask_by_key = call.mask.data && problem.tensor[TESSERA_MASK].extent[2] == 1;
  call.key_ranges = strided_of(problem, buffers, TESSERA_KEY_RANGES);
  call.key_range_columns = static_cast<int>(problem.tensor[TESSERA_KEY_RANGES].extent[3]);
  call.key_ranges_thd = is_thd_q(problem);
  call.segments_q = strided_of(problem, buffers, TESSERA_SEGMENT_IDS_Q);
  call.segments_k = strided_of(problem, buffers, TESSERA_SEGMENT_IDS_K);
}

void fill_dropout(const Problem& problem, const Buffers& buffers, Call& call) {
  call.has_dropout = has(problem, TESSERA_DROPOUT);
  call.dropout_scale = 1.0f;
  if (!call.has_dropout) return;
  const Strided state = strided_of(problem, buffers, TESSERA_RNG_STATE);
  const auto* words = reinterpret_cast<const int64_t*>(state.data);
  const int64_t step = state.stride[0] / size_of(TESSERA_INT64);
  const auto count = static_cast<int>(problem.tensor[TESSERA_RNG_STATE].extent[0]);
  const auto threshold = static_cast<uint32_t>(buffers.dropout_p * 65536.0 + 0.5);
  call.dropout = Dropout::make(words[0], words[step], threshold);
  call.dropout_heads = DropoutHeads::of(words, step, count, call.hq);
  call.dropout_scale = static_cast<float>(65536.0 / (65536.0 - threshold));
}

}  // namespace

Strided strided_of(const Problem& problem, const Buffers& buffers, int index) {
  const Tensor& t = problem.tensor[index];
  Strided s{};
  s.dtype = t.dtype;
  if (!given(problem, index)) return s;
  s.data = static_cast<char*>(buffers.data[index]);
  for (int axis = 0; axis < tensor_rule(index).rank; ++axis) {
    s.stride[axis] = t.extent[axis] <= 1 ? 0 : t.stride[axis] * size_of(t.dtype);
  }
  return s;
}

bool has_no_rows(const Problem& problem) {
  return element_count(problem.tensor[TESSERA_Q], 4) == 0;
}

Rows rows_of(const Problem& problem, const Buffers& buffers, int index) {
  const Strided s = strided_of(problem, buffers, index);
  return {s.data, s.dtype, s.stride[0], s.stride[1], s.stride[2]};
}

Call make_call(const Problem& problem, const Buffers& buffers, CallSequence* sequences) {
  const Sizes sizes = sizes_of(problem);
  Call call{};
  call.batch = sizes.batch;
  call.hq = sizes.hq, call.hk = sizes.hk, call.group = sizes.group();
  call.dqk = sizes.dqk, call.dv = sizes.dv;
  call.q = rows_of(problem, buffers, TESSERA_Q);
  call.k = rows_of(problem, buffers, TESSERA_K);
  call.v = rows_of(problem, buffers, TESSERA_V);
  call.o = rows_of(problem, buffers, TESSERA_O);
  if (is_paged(problem)) {
    const bool own_table = given(problem, TESSERA_PAGE_TABLE_V);
    call.k_pages = pages_of(problem, buffers, TESSERA_K, TESSERA_PAGE_TABLE_K);
    call.v_pages = pages_of(problem, buffers, TESSERA_V,
                            own_table ? TESSERA_PAGE_TABLE_V : TESSERA_PAGE_TABLE_K);
  }
  call.k_scale = strided_of(problem, buffers, TESSERA_K_SCALE);
  call.v_scale = strided_of(problem, buffers, TESSERA_V_SCALE);
  fill_score(problem, buffers, call);
  fill_visibility(problem, buffers, call);
  fill_dropout(problem, buffers, call);
  call.has_sink = has_sink(problem);
  call.sink = strided_of(problem, buffers, TESSERA_SINK);
  call.adds = has(problem, TESSERA_ACCUMULATE);
  call.lse = strided_of(problem, buffers, TESSERA_LSE);
  call.max_logit = strided_of(problem, buffers, TESSERA_MAX_LOGIT);
  fill_sequences(problem, buffers, sizes.batch, sequences);
  call.sequences = sequences;
  call.interrupt = buffers.interrupt;
  return call;
}

}  // namespace tessera::cpu
