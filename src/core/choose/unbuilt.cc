// SPDX-License-Identifier: Apache-2.0
#include "core/choose/unbuilt.h"

namespace tessera {
namespace {

void refuse(Support& support, ReasonId id, const std::string& what) {
  support.require(false, id, Remedy::kNone,
                  [&] { return what + ": this backend does not have it yet; leave it out"; });
}

void refuse_tensor(Support& support, const Problem& p, int index) {
  refuse(support, ReasonId::kFeature,
         std::string(name_of(p, index)) + ".shape=" + shape_text(p, index));
}

}  // namespace

void require_built(Support& support, const Problem& p, Fp8Inputs fp8) {
  if (given(p, TESSERA_KEEP_TAIL)) refuse_tensor(support, p, TESSERA_KEEP_TAIL);
  const bool is_q_fp8 = is_fp8(p.tensor[TESSERA_Q].dtype), products = has(p, TESSERA_FP8_PRODUCTS);
  const bool rounded = products && fp8 == Fp8Inputs::kRounded;
  const bool built = rounded || (is_q_fp8 && fp8 != Fp8Inputs::kUnbuilt);
  for (int i = TESSERA_Q_SCALE; !built && i <= TESSERA_AMAX_DV; ++i) {
    if (given(p, i)) refuse_tensor(support, p, i);
  }
  for (const int i : {TESSERA_K_SCALE, TESSERA_V_SCALE}) {  // blocks of keys
    if (!built && p.tensor[i].extent[2] > 1) refuse_tensor(support, p, i);
  }
  if (is_q_fp8 && has(p, TESSERA_ACCUMULATE)) {
    refuse(support, ReasonId::kFeature, "accumulate=True beside fp8 q");
  }
  if (!products) return;
  if (!rounded) refuse(support, ReasonId::kFeature, "precision=\"fp8\"");
  if (has(p, TESSERA_ACCUMULATE)) {
    refuse(support, ReasonId::kFeature, "accumulate=True beside precision=\"fp8\"");
  }
  if (is_paged(p)) refuse(support, ReasonId::kFeature, "page_table beside precision=\"fp8\"");
}

}  // namespace tessera
