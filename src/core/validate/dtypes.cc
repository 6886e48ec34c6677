// SPDX-License-Identifier: Apache-2.0
// Which dtypes a tensor may have beside the others.
#include <bit>

#include "core/problem/problem.h"
#include "core/validate/validate.h"

namespace tessera {
namespace {

constexpr uint32_t bit(int32_t dtype) { return 1u << dtype; }

constexpr uint32_t kAnyFloat = bit(TESSERA_FP32) | bit(TESSERA_BF16) | bit(TESSERA_FP16) |
                               bit(TESSERA_FP64) | bit(TESSERA_E4M3) | bit(TESSERA_E5M2);
constexpr uint32_t kAnyFp8 = bit(TESSERA_E4M3) | bit(TESSERA_E5M2);
constexpr uint32_t kAnyLength = bit(TESSERA_INT32) | bit(TESSERA_INT64);

// What o or a gradient may be beside inputs of `dtype`: sums of parts stay in fp32, and fp8 is
// rounded to what the caller asks for.
uint32_t beside(int32_t dtype) {
  return bit(dtype) | (is_16bit(dtype) ? bit(TESSERA_FP32) : 0) |
         (is_fp8(dtype) ? kAnyFp8 | bit(TESSERA_BF16) | bit(TESSERA_FP16) : 0);
}

uint32_t allowed_dtypes(const Problem& p, int index) {
  const int32_t q = p.tensor[TESSERA_Q].dtype;
  switch (index) {
    case TESSERA_DQ:
    case TESSERA_DK:
    case TESSERA_DV:
      return beside(p.tensor[tensor_like(index)].dtype);
    case TESSERA_DO:
      return bit(p.tensor[TESSERA_O].dtype) | bit(q) |
             (is_fp8(q) || has(p, TESSERA_FP8_PRODUCTS) ? kAnyFp8 : 0);
  }
  if (const int source = tensor_like(index); source != index) return bit(p.tensor[source].dtype);
  switch (index) {
    case TESSERA_Q:
      return kAnyFloat;
    case TESSERA_K:
      return bit(q) | (is_16bit(q) || is_fp8(q) ? kAnyFp8 : 0);
    case TESSERA_V:
      return is_fp8(q) ? kAnyFp8 : bit(p.tensor[TESSERA_K].dtype);
    case TESSERA_O:
      return beside(q) | (is_fp8(q) ? bit(TESSERA_FP32) : 0);
    case TESSERA_BIAS:
    case TESSERA_SINK:
    case TESSERA_ALIBI_SLOPES:
      return (is_fp8(q) ? 0 : bit(q)) | bit(TESSERA_FP32);
    case TESSERA_LSE:
    case TESSERA_DLSE:
    case TESSERA_MAX_LOGIT:
      return bit(q == TESSERA_FP64 ? TESSERA_FP64 : TESSERA_FP32);
    case TESSERA_MASK:
    case TESSERA_KEEP_TAIL:
      return bit(TESSERA_BOOL);
    case TESSERA_K_SCALE:
    case TESSERA_V_SCALE:
    case TESSERA_Q_SCALE:
    case TESSERA_DO_SCALE:
    case TESSERA_O_SCALE:
    case TESSERA_DQ_SCALE:
    case TESSERA_DK_SCALE:
    case TESSERA_DV_SCALE:
    case TESSERA_AMAX_O:
    case TESSERA_AMAX_DQ:
    case TESSERA_AMAX_DK:
    case TESSERA_AMAX_DV:
      return bit(TESSERA_FP32);
    case TESSERA_RNG_STATE:
      return bit(TESSERA_INT64);
    case TESSERA_KEY_RANGES:
    case TESSERA_SEGMENT_IDS_Q:
    case TESSERA_SEGMENT_IDS_K:
    case TESSERA_PAGE_TABLE_K:
    case TESSERA_PAGE_TABLE_V:
      return bit(TESSERA_INT32);
  }
  return kAnyLength;
}

}  // namespace

// The tensor whose dtype a gradient (or do) shares.
int tensor_like(int index) {
  switch (index) {
    case TESSERA_DQ:
      return TESSERA_Q;
    case TESSERA_DK:
      return TESSERA_K;
    case TESSERA_DV:
      return TESSERA_V;
    case TESSERA_DO:
      return TESSERA_O;
    case TESSERA_DBIAS:
      return TESSERA_BIAS;
    case TESSERA_DSINK:
      return TESSERA_SINK;
    case TESSERA_DALIBI_SLOPES:
      return TESSERA_ALIBI_SLOPES;
  }
  return index;
}

int32_t usual_dtype(const Problem& p, int index) {
  const uint32_t allowed = allowed_dtypes(p, index);
  if (std::has_single_bit(allowed)) return std::countr_zero(allowed);
  // Where several are allowed, it is that of the tensor it is like; fp8 only for do, which is as o.
  const int32_t like = p.tensor[index == TESSERA_O ? int{TESSERA_Q} : tensor_like(index)].dtype;
  if (!is_fp8(like) || index == TESSERA_DO) return like;
  const int32_t o = p.tensor[TESSERA_O].dtype;
  return index != TESSERA_O && is_16bit(o) ? o : int32_t{TESSERA_BF16};
}

Status validate_dtype(const Problem& p, int index) {
  const uint32_t allowed = allowed_dtypes(p, index);
  if ((allowed & bit(p.tensor[index].dtype)) != 0) return {};
  std::string names;
  for (int32_t dtype = TESSERA_FP32; dtype <= TESSERA_INT64; ++dtype) {
    if ((allowed & bit(dtype)) == 0) continue;
    names += (names.empty() ? "" : " or ") + std::string(dtype_name(dtype));
  }
  Problem other = p;  // whether it depends on q's
  other.tensor[TESSERA_Q].dtype =
      p.tensor[TESSERA_Q].dtype == TESSERA_FP32 ? TESSERA_BF16 : TESSERA_FP32;
  if (index != TESSERA_Q && allowed_dtypes(other, index) != allowed)
    names += " beside q in " + std::string(dtype_name(p.tensor[TESSERA_Q].dtype));
  return invalid("%s.dtype=%s: must be %s; convert it", name_of(p, index),
                 dtype_name(p.tensor[index].dtype).data(), names.c_str());
}

}  // namespace tessera
