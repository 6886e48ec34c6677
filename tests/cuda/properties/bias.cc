// SPDX-License-Identifier: Apache-2.0
// A bias in q's type whose rows begin anywhere: on Hopper kernels read a copy of it.
#include "properties.h"

namespace tessera_test {
namespace {

// What a problem gives, with dbias behind it, where rows of its bias are `row` elements apart. NaN
// stands between them.
std::vector<uint8_t> outputs_with_rows(const Options& o, int64_t row) {
  Attention attention(o);
  const int64_t rows = o.b * o.hq * o.sq;
  std::vector<uint16_t> bias(static_cast<size_t>(rows * row), 0xFFFF);
  uint32_t bits = 1;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t key = 0; key < o.sk; ++key) {
      bits = bits * 1664525 + 1013904223;
      // The values have either sign, and are below 1/64 in bf16 and between 1 and 1.25 in fp16.
      bias[static_cast<size_t>(r * row + key)] =
          static_cast<uint16_t>(0x3C00 | (bits >> 16 & 0x80FF));
    }
  }
  attention.give(TESSERA_BIAS, o.dtype, {o.b, o.hq, o.sq, row}, bias.data());
  attention.problem.tensor[TESSERA_BIAS].extent[3] = o.sk;
  const bool backward = o.pass == TESSERA_BACKWARD;
  if (backward) attention.give(TESSERA_DBIAS, o.dtype, {o.b, o.hq, o.sq, o.sk}, nullptr);
  attention.prepare();
  attention.run();
  std::vector<uint8_t> all = attention.outputs();
  attention.check_guards();
  if (!backward) return all;
  const size_t end = all.size(), bytes = static_cast<size_t>(2 * rows * o.sk);
  all.resize(end + bytes);
  require(
      cudaMemcpy(&all[end], attention.buffers.data[TESSERA_DBIAS], bytes, cudaMemcpyDeviceToHost),
      "cudaMemcpy");
  return all;
}

}  // namespace

void biases() {
  if (device_arch() != 90) return;
  Options o;
  o.backend = "cuda_sm90";
  for (const int64_t keys : {49, 50, 52, 197, 200}) {
    for (const int64_t d : {64, 96, 128, 256}) {
      for (const int pass : {TESSERA_FORWARD, TESSERA_BACKWARD}) {
        o.dtype = keys % 2 ? TESSERA_BF16 : TESSERA_FP16;
        o.sq = 70, o.sk = keys, o.d = d, o.pass = pass;
        o.flags = pass == TESSERA_BACKWARD ? TESSERA_DETERMINISTIC : 0;
        check("bias", name_of(o) + text(" %d keys", static_cast<int>(keys)), [&] {
          const int64_t aligned = (keys + 7) / 8 * 8;
          const std::vector<uint8_t> expected = outputs_with_rows(o, aligned);
          for (int64_t row = keys; row < keys + 8; ++row) {
            if (row == aligned) continue;
            require_equal(expected, outputs_with_rows(o, row),
                          text("rows of %d", static_cast<int>(row)));
          }
          return std::string("rows that begin anywhere give the bits of aligned ones");
        });
      }
    }
  }
}

}  // namespace tessera_test
