// SPDX-License-Identifier: Apache-2.0
// Work of context parallelism on packed sequences, and copies between layouts, against loops of
// their own.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <string>

#include "tessera_nvte.h"

namespace nvte_test {
namespace {

using transformer_engine::DType;
using transformer_engine::TensorWrapper;
using Shape = std::vector<size_t>;
using Floats = std::vector<float>;

constexpr float kInf = std::numeric_limits<float>::infinity();

TensorWrapper numbers(std::vector<int32_t>& values) {
  return {values.data(), Shape{values.size()}, DType::kInt32};
}
TensorWrapper floats(Floats& values, const Shape& shape) {
  return {values.data(), shape, DType::kFloat32};
}
Floats counted(size_t count, float first = 0) {
  Floats values(count);
  std::iota(values.begin(), values.end(), first);
  return values;
}

// Sequences of 4, 0, 8 and 2 tokens, then 2 tokens that belong to none.
struct Packed {
  static constexpr size_t kT = 16, kH = 2, kD = 3, kW = kH * kD;
  std::vector<int32_t> cu{0, 4, 4, 12, 14};
  TensorWrapper cu_seqlens = numbers(cu);
  std::vector<size_t> halves[2] = {{0, 1, 4, 5, 6, 7, 12}, {2, 3, 8, 9, 10, 11, 13}};
  size_t half_of(size_t token) const {
    for (size_t half = 0; half < 2; ++half)
      for (const size_t t : halves[half])
        if (t == token) return half;
    return 2;
  }
};

void expect_refused(const char* says, const std::function<void()>& call) {
  try {
    call();
    ADD_FAILURE() << says << ": nothing was thrown";
  } catch (const std::runtime_error& error) {
    EXPECT_NE(std::string(error.what()).find(says), std::string::npos) << error.what();
  }
}

TEST(NvteTokens, HalvesOfSequences) {
  Packed p;
  for (const bool pair : {false, true}) {
    for (int half = 0; half < 2; ++half) {
      const size_t parts = pair ? 2 : 1;
      Floats from = counted(parts * p.kT * p.kW), to(parts * 8 * p.kW, -1), expected = to;
      const Shape whole = pair ? Shape{2, p.kT, p.kH, p.kD} : Shape{p.kT, p.kH, p.kD},
                  part = pair ? Shape{2, 8, p.kH, p.kD} : Shape{8, p.kH, p.kD};
      for (size_t x = 0; x < parts; ++x)
        for (size_t i = 0; i < 7; ++i)
          for (size_t e = 0; e < p.kW; ++e)
            expected[(x * 8 + i) * p.kW + e] = from[(x * p.kT + p.halves[half][i]) * p.kW + e];
      const auto a = floats(from, whole), b = floats(to, part);
      nvte_cp_thd_read_half_tensor(a.data(), p.cu_seqlens.data(), b.data(), half, nullptr);
      EXPECT_EQ(to, expected) << pair << half;
    }
  }
  Floats from(p.kT * p.kW), to(6 * p.kW);
  const auto a = floats(from, {p.kT, p.kH, p.kD}), b = floats(to, {6, p.kH, p.kD});
  expect_refused("half: has 6 tokens, must have 7", [&] {
    nvte_cp_thd_read_half_tensor(a.data(), p.cu_seqlens.data(), b.data(), 0, nullptr);
  });
  expect_refused("half_idx=2", [&] {
    nvte_cp_thd_read_half_tensor(a.data(), p.cu_seqlens.data(), b.data(), 2, nullptr);
  });
  p.cu[1] = 3;
  expect_refused("cu_seqlens[1]=3", [&] {
    nvte_cp_thd_read_half_tensor(a.data(), p.cu_seqlens.data(), b.data(), 0, nullptr);
  });
}

// [h, t] or [b, h, s] by (sequence, head, token); `divisor` 2 of halves.
struct LseAt {
  const Packed& p;
  bool packed;
  size_t extent, divisor;
  size_t operator()(size_t n, size_t h, size_t i) const {
    if (!packed) return (n * p.kH + h) * extent + i;
    return h * extent + static_cast<size_t>(p.cu[n]) / divisor + i;
  }
  Shape shape() const { return packed ? Shape{p.kH, extent} : Shape{4, p.kH, extent}; }
  size_t numel() const { return (packed ? 1 : 4) * p.kH * extent; }
};

TEST(NvteTokens, LogSumExpsOfSecondHalves) {
  Packed p;
  for (const bool packed : {false, true}) {
    const LseAt at{p, packed, packed ? size_t{16} : size_t{9}, 1},
        part_at{p, packed, packed ? size_t{8} : size_t{4}, 2};
    Floats lse = counted(at.numel(), 0.25f), step = counted(part_at.numel(), -3);
    Floats joined = lse, read(part_at.numel(), 99), expected_read = read;
    lse[at(2, 1, 5)] = joined[at(2, 1, 5)] = -kInf, step[part_at(2, 1, 1)] = -kInf;
    lse[at(2, 0, 4)] = -kInf;
    for (size_t n = 0; n < 4; ++n) {
      const auto half = static_cast<size_t>(p.cu[n + 1] - p.cu[n]) / 2;
      for (size_t h = 0; h < p.kH; ++h)
        for (size_t i = 0; i < half; ++i) {
          const double x = lse[at(n, h, half + i)], y = step[part_at(n, h, i)];
          joined[at(n, h, half + i)] = static_cast<float>(std::log(std::exp(x) + std::exp(y)));
          expected_read[part_at(n, h, i)] = lse[at(n, h, half + i)];
        }
    }
    const auto tl = floats(lse, at.shape()), ts = floats(step, part_at.shape()),
               tr = floats(read, part_at.shape());
    nvte_cp_thd_read_second_half_lse(tl.data(), p.cu_seqlens.data(), tr.data(), packed,
                                     static_cast<int>(part_at.extent), nullptr);
    EXPECT_EQ(read, expected_read) << packed;
    nvte_cp_thd_second_half_lse_correction(tl.data(), ts.data(), p.cu_seqlens.data(), packed,
                                           nullptr);
    for (size_t i = 0; i < lse.size(); ++i) {
      if (joined[i] == -kInf) {
        EXPECT_EQ(lse[i], -kInf);
      } else {
        EXPECT_NEAR(lse[i], joined[i], 1e-5 * std::fabs(joined[i]) + 1e-6) << packed << " " << i;
      }
    }
    expect_refused("second_half_lse_seqlen=3", [&] {
      nvte_cp_thd_read_second_half_lse(tl.data(), p.cu_seqlens.data(), tr.data(), packed, 3,
                                       nullptr);
    });
  }
  Floats lse(2 * 13), step(2 * 8);
  const auto tl = floats(lse, {2, 13}), ts = floats(step, {2, 8});
  expect_refused("lse: has 13 tokens, must have 14", [&] {
    nvte_cp_thd_second_half_lse_correction(tl.data(), ts.data(), p.cu_seqlens.data(), 1, nullptr);
  });
}

// 16-bit numbers of small integers and halves of them, exact in either dtype.
uint16_t bits16(float value, DType dtype) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (dtype == DType::kBFloat16) return static_cast<uint16_t>(bits >> 16);
  if (value == 0) return 0;
  return static_cast<uint16_t>((bits >> 16 & 0x8000) | (((bits >> 23 & 255) - 112) << 10) |
                               (bits >> 13 & 0x3ff));
}

struct Elements {
  DType dtype;
  std::vector<uint8_t> bytes;
  Elements(const Floats& values, DType type) : dtype(type) {
    bytes.resize(values.size() * (type == DType::kFloat32 ? 4 : 2));
    for (size_t i = 0; i < values.size(); ++i) {
      const uint16_t half = bits16(values[i], type);
      if (type == DType::kFloat32) {
        std::memcpy(&bytes[4 * i], &values[i], 4);
      } else {
        std::memcpy(&bytes[2 * i], &half, 2);
      }
    }
  }
  TensorWrapper tensor(const Shape& shape) { return {bytes.data(), shape, dtype}; }
};

TEST(NvteTokens, OutOfTwoSteps) {
  Packed p;
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (const bool packed : {false, true}) {
      for (const bool second : {false, true}) {
        const size_t divisor = second ? 2 : 1, step_tokens = p.kT / divisor;
        const LseAt at{p, packed, packed ? p.kT : size_t{8}, 1},
            part_at{p, packed, packed ? step_tokens : 8 / divisor, divisor};
        // Powers of two as weights: exact in every dtype.
        const float half = std::log(0.5f);
        Floats old(at.numel(), half), total(at.numel(), 0), part(part_at.numel(), half);
        Floats out(p.kT * p.kW), step(step_tokens * p.kW);
        for (size_t i = 0; i < out.size(); ++i) out[i] = static_cast<float>(i % 16) - 8;
        for (size_t i = 0; i < step.size(); ++i) step[i] = static_cast<float>(i % 8) * 2;
        // A token that saw no key before, whose out may be anything, and one that sees none now.
        old[at(2, 1, 6)] = -kInf, total[at(2, 1, 6)] = half;
        part[part_at(2, 0, second ? 3 : 7)] = -kInf, total[at(2, 0, 7)] = half;
        Floats expected = out;
        for (size_t n = 0; n < 4; ++n) {
          const auto length = static_cast<size_t>(p.cu[n + 1] - p.cu[n]);
          for (size_t i = 0; i < length / divisor; ++i) {
            const size_t token = second ? length / 2 + i : i;
            const size_t row = static_cast<size_t>(p.cu[n]) + token,
                         step_row = static_cast<size_t>(p.cu[n]) / divisor + i;
            for (size_t e = 0; e < p.kW; ++e) {
              const size_t h = e / p.kD;
              const float x = out[row * p.kW + e], y = step[step_row * p.kW + e];
              const bool fresh = n == 2 && token == 6 && h == 1,
                         stale = n == 2 && token == 7 && h == 0;
              expected[row * p.kW + e] = fresh ? y : stale ? x : 0.5f * x + 0.5f * y;
            }
          }
        }
        for (size_t e = p.kD; e < p.kW; ++e) out[10 * p.kW + e] = 0;  // of (2, 1, 6)
        Elements got(out, dtype), steps(step, dtype), want(expected, dtype);
        if (dtype == DType::kFloat32) {
          const float nan = std::nanf("");
          for (size_t e = p.kD; e < p.kW; ++e)
            std::memcpy(&got.bytes[4 * (10 * p.kW + e)], &nan, 4);
        }
        const auto to = got.tensor({p.kT, p.kH, p.kD}),
                   ts = steps.tensor({step_tokens, p.kH, p.kD}), tp = floats(part, part_at.shape()),
                   tt = floats(total, at.shape()), tb = floats(old, at.shape());
        nvte_cp_thd_out_correction(to.data(), ts.data(), tb.data(), tt.data(), tp.data(),
                                   p.cu_seqlens.data(), second, packed, nullptr);
        if (dtype == DType::kFloat32) {
          for (size_t i = 0; i < expected.size(); ++i) {
            float value;
            std::memcpy(&value, &got.bytes[4 * i], 4);
            EXPECT_NEAR(value, expected[i], 1e-5) << packed << second << " " << i;
          }
        } else {
          EXPECT_EQ(got.bytes, want.bytes) << static_cast<int>(dtype) << packed << second;
        }
      }
    }
  }
}

TEST(NvteTokens, GradientsOfHalves) {
  Packed p;
  const char* const words[] = {"none", "add", "copy", "zero"};
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (int pair = 0; pair < 2; ++pair) {
      for (int word = 0; word < 16; ++word) {
        const std::string of[2] = {words[word / 4], words[word % 4]};
        const auto reads = [](const std::string& w) { return w == "add" || w == "copy"; };
        const bool one = reads(of[0]) != reads(of[1]);
        const size_t parts = pair ? 2 : 1, step_tokens = one ? 8 : p.kT;
        Floats grad(parts * p.kT * p.kW), step(parts * step_tokens * p.kW);
        for (size_t i = 0; i < grad.size(); ++i) grad[i] = static_cast<float>(i % 32);
        for (size_t i = 0; i < step.size(); ++i) step[i] = static_cast<float>(i % 64) / 2 - 16;
        Floats expected = grad;
        for (size_t x = 0; x < parts; ++x) {
          for (size_t t = 0; t < p.kT; ++t) {
            const size_t half = p.half_of(t);
            if (half == 2) continue;
            size_t row = t;
            for (size_t i = 0; one && i < 7; ++i)
              if (p.halves[half][i] == t) row = i;
            for (size_t e = 0; e < p.kW; ++e) {
              float& to = expected[(x * p.kT + t) * p.kW + e];
              if (of[half] == "zero") to = 0;
              if (!reads(of[half])) continue;
              const float from = step[(x * step_tokens + row) * p.kW + e];
              to = of[half] == "add" ? to + from : from;
            }
          }
        }
        Elements got(grad, dtype), steps(step, dtype), want(expected, dtype);
        const Shape whole = pair ? Shape{2, p.kT, p.kH, p.kD} : Shape{p.kT, p.kH, p.kD},
                    part =
                        pair ? Shape{2, step_tokens, p.kH, p.kD} : Shape{step_tokens, p.kH, p.kD};
        const auto tg = got.tensor(whole), ts = steps.tensor(part);
        nvte_cp_thd_grad_correction(tg.data(), ts.data(), p.cu_seqlens.data(), of[0].c_str(),
                                    of[1].c_str(), nullptr);
        EXPECT_EQ(got.bytes, want.bytes) << of[0] << ", " << of[1] << " " << pair;
      }
    }
  }
  std::vector<uint8_t> grad(p.kT * p.kW, 5), step(8 * p.kW, 9);
  const TensorWrapper tg(grad.data(), Shape{p.kT, p.kH, p.kD}, DType::kFloat8E5M2),
      ts(step.data(), Shape{8, p.kH, p.kD}, DType::kFloat8E5M2);
  nvte_cp_thd_grad_correction(tg.data(), ts.data(), p.cu_seqlens.data(), "copy", "zero", nullptr);
  EXPECT_EQ(grad[0], 9);
  EXPECT_EQ(grad[2 * p.kW], 0);
  EXPECT_EQ(grad[15 * p.kW], 5);
  expect_refused("must be kNVTEFloat32, kNVTEFloat16 or kNVTEBFloat16", [&] {
    nvte_cp_thd_grad_correction(tg.data(), ts.data(), p.cu_seqlens.data(), "add", "none", nullptr);
  });
  for (const char* wrong : {"sum", ""}) {
    expect_refused("first_half=", [&] {
      nvte_cp_thd_grad_correction(tg.data(), ts.data(), p.cu_seqlens.data(), wrong, "none",
                                  nullptr);
    });
  }
}

TEST(NvteTokens, OrdersOfRanks) {
  // Two sequences of 8 and 4 tokens on two ranks: chunks of 2 and of 1.
  std::vector<int32_t> cu{0, 8, 12}, index(6);
  const auto cu_seqlens = numbers(cu), output = numbers(index);
  const std::vector<int32_t> places[2] = {{0, 1, 6, 7, 8, 11}, {2, 3, 4, 5, 9, 10}};
  for (int rank = 0; rank < 2; ++rank) {
    nvte_cp_thd_get_partitioned_indices(cu_seqlens.data(), output.data(), 12, 2, rank, nullptr);
    EXPECT_EQ(index, places[rank]);
  }
  Floats whole = counted(12 * 5), ranks(12 * 5), expected, back(12 * 5);
  for (const auto& of : places)
    for (const int32_t place : of)
      for (int e = 0; e < 5; ++e) expected.push_back(whole[static_cast<size_t>(5 * place + e)]);
  const auto tw = floats(whole, {12, 5}), tr = floats(ranks, {12, 5}), tb = floats(back, {12, 5});
  nvte_thd_sequence_order_to_cp_rank_order(tw.data(), cu_seqlens.data(), tr.data(), 2, 12, nullptr);
  EXPECT_EQ(ranks, expected);
  nvte_thd_cp_rank_order_to_sequence_order(tr.data(), cu_seqlens.data(), tb.data(), 2, 12, nullptr);
  EXPECT_EQ(back, whole);
  expect_refused("rank=2", [&] {
    nvte_cp_thd_get_partitioned_indices(cu_seqlens.data(), output.data(), 12, 2, 2, nullptr);
  });
  expect_refused("world_size=0", [&] {
    nvte_cp_thd_get_partitioned_indices(cu_seqlens.data(), output.data(), 12, 0, 0, nullptr);
  });
  expect_refused("total_tokens=12: must be a multiple of 2 world_size=10", [&] {
    nvte_thd_sequence_order_to_cp_rank_order(tw.data(), cu_seqlens.data(), tr.data(), 5, 12,
                                             nullptr);
  });
  cu[1] = 6;
  expect_refused("cu_seqlens[1]=6", [&] {
    nvte_thd_sequence_order_to_cp_rank_order(tw.data(), cu_seqlens.data(), tr.data(), 2, 12,
                                             nullptr);
  });
}

TEST(NvteTokens, ValidTokensAlone) {
  std::vector<int32_t> padded{0, 4, 4, 9}, cu{0, 3, 3, 5};
  const auto places = numbers(padded), cu_seqlens = numbers(cu);
  Floats from = counted(9 * 2), to(9 * 2, -1), expected = to;
  for (const size_t t : {0, 1, 2, 4, 5})
    for (size_t e = 0; e < 2; ++e) expected[2 * t + e] = from[2 * t + e];
  const auto a = floats(from, {9, 2}), b = floats(to, {9, 2});
  nvte_thd_copy_valid_tokens_from_per_split_to_rank_local(a.data(), places.data(),
                                                          cu_seqlens.data(), b.data(), 9, nullptr);
  EXPECT_EQ(to, expected);
  cu[1] = cu[2] = 5;
  expect_refused("sequence 0 has 5 tokens, must have 0 to 4", [&] {
    nvte_thd_copy_valid_tokens_from_per_split_to_rank_local(
        a.data(), places.data(), cu_seqlens.data(), b.data(), 9, nullptr);
  });
}

TEST(NvteCopies, BuffersOfFlashAttention) {
  const size_t b = 2, s = 3, h = 2;
  for (const size_t d : {3, 8}) {
    Floats mixed = counted(s * b * h * 3 * d), apart(mixed.size()), again(mixed.size());
    const TensorWrapper q(mixed.data(), Shape{s, b, h, d}, DType::kFloat32),
        qkv(apart.data(), Shape{3, b, s, h, d}, DType::kFloat32);
    nvte_prepare_flash_attn_fwd(q.data(), qkv.data(), nullptr);
    for (size_t x = 0; x < 3; ++x)
      for (size_t n = 0; n < b; ++n)
        for (size_t i = 0; i < s; ++i)
          for (size_t e = 0; e < h * d; ++e)
            ASSERT_EQ(apart[((x * b + n) * s + i) * h * d + e],
                      mixed[((i * b + n) * h + e / d) * 3 * d + x * d + e % d]);
    const size_t each = b * s * h * d;
    const TensorWrapper tq(&apart[0], Shape{b, s, h, d}, DType::kFloat32),
        tk(&apart[each], Shape{b, s, h, d}, DType::kFloat32),
        tv(&apart[2 * each], Shape{b, s, h, d}, DType::kFloat32),
        whole(again.data(), Shape{s, b, h, 3 * d}, DType::kFloat32);
    nvte_prepare_flash_attn_bwd(tq.data(), tk.data(), tv.data(), whole.data(), nullptr);
    EXPECT_EQ(again, mixed);
    expect_refused("qkv.shape=",
                   [&] { nvte_prepare_flash_attn_fwd(tq.data(), qkv.data(), nullptr); });
  }
}

TEST(NvteCopies, ListsOfTensors) {
  const size_t b = 2, s = 3, h = 2;
  for (const bool sbhd : {false, true}) {
    for (const size_t d : {3, 16}) {
      std::vector<uint8_t> from(b * s * h * d), same(from.size()), wide(b * s * h * (d + 16), 7);
      std::iota(from.begin(), from.end(), uint8_t{0});
      const TensorWrapper in(from.data(), sbhd ? Shape{s, b, h, d} : Shape{b, s, h, d},
                             DType::kByte),
          out(same.data(), Shape{b, h, s, d}, DType::kByte),
          wider(wide.data(), Shape{b, h, s, d + 16}, DType::kByte);
      NVTETensor inputs[] = {in.data(), in.data()}, outputs[] = {out.data(), wider.data()};
      nvte_multi_tensor_transpose_to_bhsd(inputs, outputs, 2, sbhd ? NVTE_SBHD : NVTE_BSHD,
                                          nullptr);
      for (size_t n = 0; n < b; ++n)
        for (size_t i = 0; i < s; ++i)
          for (size_t x = 0; x < h; ++x)
            for (size_t e = 0; e < d + 16; ++e) {
              const size_t row = sbhd ? i * b + n : n * s + i, to = (n * h + x) * s + i;
              const uint8_t value = e < d ? from[(row * h + x) * d + e] : uint8_t{0};
              ASSERT_EQ(wide[to * (d + 16) + e], value);
              ASSERT_EQ(e < d ? same[to * d + e] : value, value);
            }
      expect_refused("original_format=2", [&] {
        nvte_multi_tensor_transpose_to_bhsd(inputs, outputs, 2, NVTE_THD, nullptr);
      });
    }
  }
  Floats narrow = counted(6), wide(2 * 5, 9);
  const auto in = floats(narrow, {2, 3}), out = floats(wide, {2, 5});
  NVTETensor inputs[] = {in.data()}, outputs[] = {out.data()};
  nvte_multi_tensor_pad_last_dim(inputs, outputs, 1, nullptr);
  EXPECT_EQ(wide, (Floats{0, 1, 2, 0, 0, 3, 4, 5, 0, 0}));
  expect_refused("outputs[0].shape=[2, 3]",
                 [&] { nvte_multi_tensor_pad_last_dim(outputs, inputs, 1, nullptr); });
  expect_refused("outputs=null",
                 [&] { nvte_multi_tensor_pad_last_dim(inputs, nullptr, 1, nullptr); });
  nvte_multi_tensor_pad_last_dim(nullptr, nullptr, 0, nullptr);
}

}  // namespace
}  // namespace nvte_test
