// SPDX-License-Identifier: Apache-2.0
#include "core/utilities/dropout_mask.h"

#include <cinttypes>

#include "core/mask/philox.h"
#include "core/validate/validate.h"
#include "core/validate/values.h"

namespace tessera {
namespace {

Status check_words(const char* name, const int64_t* words, const char* what) {
  if (reinterpret_cast<uintptr_t>(words) % sizeof *words == 0) return {};
  return invalid("%s=%p: must be a multiple of 8 bytes; pass an aligned copy%s", name,
                 static_cast<const void*>(words), what);
}

Status check_starts(const char* name, const int64_t* starts, int64_t b, const Device& device) {
  TESSERA_RETURN_IF_ERROR(check_words(name, starts, " of int64 [b]"));
  if (!starts || device.kind != TESSERA_CPU) return {};
  for (int64_t n = 0; n < b; ++n) {
    if (starts[n] >= 0 && starts[n] <= kMostPosition) continue;
    return invalid("%s[%" PRId64 "]=%" PRId64 ": a position must be between 0 and 2^60", name, n,
                   starts[n]);
  }
  return {};
}

}  // namespace

Result<DropoutMaskArgs> dropout_mask_args(const DropoutMaskCall& c, const Device& device) {
  const int64_t shape[4] = {c.b, c.hq, c.sq, c.sk};
  const Tensor mask{TESSERA_BOOL, 0, {c.b, c.hq, c.sq, c.sk}, {}};
  if (c.b < 0 || c.hq < 1 || c.sq < 0 || c.sk < 0 || !fits_in_memory(mask, 4)) {
    return invalid(
        "keep.shape=%s: must be [b, hq, sq, sk] with hq at least 1, nothing negative, "
        "and below 2^63 elements",
        list_text(shape, 4).c_str());
  }
  const uint32_t threshold = dropout_threshold(c.dropout_p);
  if (threshold == 0 && c.dropout_p != 0) {
    return invalid(
        "dropout_p=%g: must be in [0, 1), and p * 65536 must round to 1..65535, or be 0 "
        "for no dropout",
        c.dropout_p);
  }
  if (c.rng_words != 2 && c.rng_words != 4) {
    return invalid(
        "rng_words=%d: must be 2 (seed, offset) or 4 (seed, offset, first, stride), the "
        "length of rng_state",
        c.rng_words);
  }
  if (!c.rng_state) return invalid("rng_state=NULL: must point to int64 (seed, offset)");
  TESSERA_RETURN_IF_ERROR(check_words("rng_state", c.rng_state, ""));
  TESSERA_RETURN_IF_ERROR(check_starts("q_start", c.q_start, c.b, device));
  TESSERA_RETURN_IF_ERROR(check_starts("k_start", c.k_start, c.b, device));
  const int64_t count = element_count(mask, 4);
  if (!c.keep && count > 0) {
    return invalid("keep=NULL: must point to the %" PRId64 " bytes of shape %s", count,
                   list_text(shape, 4).c_str());
  }
  return DropoutMaskArgs{c.b,         c.hq,        c.sq,      c.sk,      threshold,
                         c.rng_words, c.rng_state, c.q_start, c.k_start, c.keep};
}

}  // namespace tessera
