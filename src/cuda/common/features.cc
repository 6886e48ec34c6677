// SPDX-License-Identifier: Apache-2.0
#include "cuda/common/features.h"

namespace tessera::cuda {

uint32_t features_of(const Problem& p) {
  uint32_t features = kLean;
  if (given(p, TESSERA_ALIBI_SLOPES)) features |= kAlibi;
  if (has(p, TESSERA_SOFTCAP)) features |= kSoftcap;
  if (has(p, TESSERA_DROPOUT)) features |= kDropout;
  if (given(p, TESSERA_BIAS)) features |= kBias;
  const bool segments = given(p, TESSERA_SEGMENT_IDS_Q),
             others = given(p, TESSERA_MASK) || given(p, TESSERA_KEY_RANGES);
  if (segments || others) features |= kMasks;
  if (segments && !others) features |= kSegments;
  if (is_paged(p) || given(p, TESSERA_K_SCALE) || given(p, TESSERA_V_SCALE) ||
      is_fp8(p.tensor[TESSERA_K].dtype)) {
    features |= kOther;
  }
  return features;
}

}  // namespace tessera::cuda
