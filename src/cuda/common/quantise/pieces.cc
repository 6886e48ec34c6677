// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "cuda/common/quantise/quantise.h"

namespace tessera::cuda {

Rounded take_rounded(const Problem& problem, const RoundedPieces& pieces, Workspace& workspace) {
  constexpr int kAlignment = 256;
  const Sizes s = sizes_of(problem);
  const auto bytes = [&](int index) {
    return workspace.take<uint8_t>(bytes_of(rounded_like(problem.tensor[index])), kAlignment);
  };
  const Count rows = Count{problem.tensor[TESSERA_Q].extent[0]} * s.sq * s.hq;
  const Count slots = num_key_slots(is_thd_k(problem), s.sk, std::max<int64_t>(s.batch, 1));
  Rounded to{};
  to.q = bytes(TESSERA_Q);
  to.k = bytes(TESSERA_K);
  if (pieces.rows_of_v) to.v = bytes(TESSERA_V);
  to.q_scale = workspace.take<float>(rows);
  to.k_scale = workspace.take<float>(slots * s.hk);
  to.v_scale = workspace.take<float>(slots * s.hk);
  if (pieces.grad_o) {
    to.grad_o = bytes(TESSERA_DO);
    to.do_scale = workspace.take<float>(rows);
  }
  if (has(problem, TESSERA_SMOOTH_MEAN)) {
    const Count head = Count{s.hk} * s.dqk;
    to.row = workspace.take<float>(rows);
    to.mean = workspace.take<float>(head * std::max<int64_t>(s.batch, 1));
    to.sums = workspace.take<float>(head * slots);
  }
  workspace.take<char>(0, kAlignment);
  to.key_slots = static_cast<int>(std::min<int64_t>(slots.value(), INT32_MAX));
  return to;
}

}  // namespace tessera::cuda
