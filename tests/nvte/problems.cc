// SPDX-License-Identifier: Apache-2.0
#include "nvte/problems.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <random>

#include "nvte/small_call.h"

namespace nvte_test {
namespace {

// Queries without memory are about the current GPU, and all memory of these tests is the host's:
// there is none, of the driver that a build with CUDA would start later.
[[maybe_unused]] const int kNoGpu = setenv("CUDA_VISIBLE_DEVICES", "", 1);

constexpr tessera_device kCpu{TESSERA_CPU, 0, 0, 0};
constexpr int32_t kPageSize = 5;

bool is_padding(NVTE_Mask_Type mask) { return mask == 1 || mask == 3 || mask == 5; }
bool is_causal(NVTE_Mask_Type mask) { return mask >= 2; }

std::vector<uint8_t> poisoned(int64_t bytes) {
  return std::vector<uint8_t>(static_cast<size_t>(bytes) + 64, 0xff);
}

tessera_tensor contiguous(int32_t dtype, std::vector<int64_t> extent) {
  tessera_tensor t{dtype, 0, {}, {}};
  int64_t stride = 1;
  for (size_t axis = extent.size(); axis-- > 0; stride *= extent[axis]) {
    t.extent[axis] = extent[axis];
    t.stride[axis] = stride;
  }
  return t;
}

// The recursion of the ALiBi paper's program.
std::vector<float> slopes_of(int64_t heads) {
  const auto power = static_cast<int64_t>(std::exp2(std::floor(std::log2(heads))));
  std::vector<float> slopes;
  for (int64_t i = 1; i <= power; ++i) {
    slopes.push_back(static_cast<float>(std::pow(2.0, -8.0 * i / power)));
  }
  for (int64_t i = 0; i < heads - power; ++i) {
    slopes.push_back(static_cast<float>(std::pow(2.0, -8.0 * (2 * i + 1) / (2 * power))));
  }
  return slopes;
}

const int64_t kRngState[2] = {123456789, 7};

}  // namespace

void Memory::fill(uint32_t seed) {
  std::mt19937 random(seed);
  for (int64_t i = 0; i < static_cast<int64_t>(bytes.size()) / size(); ++i) {
    const float value = static_cast<float>(random() % 2001) / 1000.0f - 1.0f;
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if (size() == 2) bits >>= 16;
    std::memcpy(at(i), &bits, static_cast<size_t>(size()));
  }
}

Values values_of(const Attention& a) {
  Values v;
  const int64_t b = a.q.b();
  const auto plain = [&](const char* name, int64_t s, int64_t h, int64_t d, uint32_t seed) {
    Plain& made = v.plain.emplace(name, Plain(a.dtype, b, s, h, d)).first->second;
    if (seed) made.memory.fill(seed);
  };
  plain("q", a.sq, a.hq, a.dqk, 1), plain("k", a.sk, a.hk, a.dqk, 2),
      plain("v", a.sk, a.hk, a.dv, 3);
  plain("do", a.sq, a.hq, a.dv, 4), plain("o", a.sq, a.hq, a.dv, 0);
  plain("dq", a.sq, a.hq, a.dqk, 0), plain("dk", a.sk, a.hk, a.dqk, 0),
      plain("dv", a.sk, a.hk, a.dv, 0);
  const auto flat = [&](const char* name, DType dtype, int64_t numel, uint32_t seed) {
    Memory& made = v.flat.emplace(name, Memory(dtype, numel)).first->second;
    if (seed) made.fill(seed);
  };
  flat("lse", DType::kFloat32, b * a.hq * a.sq, 0), flat("max", DType::kFloat32, a.hq, 0);
  flat("sink", DType::kFloat32, a.hq, a.softmax == NVTE_LEARNABLE_SOFTMAX ? 5 : 0);
  flat("dsink", DType::kFloat32, a.hq, 0);
  if (a.softmax == NVTE_OFF_BY_ONE_SOFTMAX) std::fill_n(v.flat.at("sink").at(0), a.hq * 4, 0);
  const int64_t bias = a.bias_shape.empty()
                           ? 0
                           : std::accumulate(a.bias_shape.begin(), a.bias_shape.end(), int64_t{1},
                                             std::multiplies<>());
  flat("bias", a.dtype, bias, 6), flat("dbias", a.dtype, bias, 0);
  return v;
}

void run_plain(const Attention& a, Values& v) {
  const int32_t dtype = a.dtype == DType::kFloat32 ? TESSERA_FP32 : TESSERA_BF16;
  tessera_problem p{};
  tessera_buffers buffers{};
  p.struct_size = sizeof p, buffers.struct_size = sizeof buffers;
  const auto give = [&](int index, const tessera_tensor& tensor, const void* data) {
    p.tensor[index] = tensor, buffers.data[index] = const_cast<void*>(data);
  };
  const auto plain = [&](int index, const char* name) {
    Plain& t = v.plain.at(name);
    give(index, contiguous(dtype, {t.b, t.s, t.h, t.d}), t.memory.data());
  };
  plain(TESSERA_Q, "q"), plain(TESSERA_K, "k"), plain(TESSERA_V, "v"), plain(TESSERA_O, "o");
  const int64_t b = a.q.b();
  give(TESSERA_LSE, contiguous(TESSERA_FP32, {b, a.hq, a.sq}), v.flat.at("lse").data());
  if (a.max_logit)
    give(TESSERA_MAX_LOGIT, contiguous(TESSERA_FP32, {a.hq}), v.flat.at("max").data());
  if (is_padding(a.mask)) {
    give(TESSERA_SEQLENS_Q, contiguous(TESSERA_INT32, {b}), a.q.lens.data());
    give(TESSERA_SEQLENS_K, contiguous(TESSERA_INT32, {b}), a.k.lens.data());
  }
  p.flags = TESSERA_SOFTMAX_SCALE | (is_causal(a.mask) ? TESSERA_CAUSAL : 0);
  buffers.softmax_scale = static_cast<double>(a.scale);
  if (a.left >= 0 || a.right >= 0) {
    p.flags |= TESSERA_WINDOW;
    p.window_left = a.left, p.window_right = a.right;
  }
  const bool bottom_right = is_causal(a.mask) ? a.mask >= 4 : a.bottom_right;
  p.align = bottom_right ? TESSERA_ALIGN_BOTTOM_RIGHT : TESSERA_ALIGN_TOP_LEFT;
  if (!a.bias_shape.empty()) {
    give(TESSERA_BIAS, contiguous(dtype, a.bias_shape), v.flat.at("bias").data());
    if (a.bias == NVTE_PRE_SCALE_BIAS) p.flags |= TESSERA_BIAS_PRE_SCALE;
  }
  const std::vector<float> slopes = slopes_of(a.hq);
  if (a.bias == NVTE_ALIBI) {
    give(TESSERA_ALIBI_SLOPES, contiguous(TESSERA_FP32, {1, a.hq}), slopes.data());
  }
  if (a.softmax != NVTE_VANILLA_SOFTMAX) {
    give(TESSERA_SINK, contiguous(TESSERA_FP32, {a.hq}), v.flat.at("sink").data());
  }
  if (a.dropout > 0) {
    p.flags |= TESSERA_DROPOUT;
    buffers.dropout_p = static_cast<double>(a.dropout);
    give(TESSERA_RNG_STATE, contiguous(TESSERA_INT64, {2}), kRngState);
  }
  const auto run = [&] {
    tessera_error error{};
    tessera_info info{};
    error.struct_size = sizeof error, info.struct_size = sizeof info;
    ASSERT_EQ(tessera_prepare(&p, &kCpu, 0, &info, &error), TESSERA_OK) << error.message;
    auto workspace = poisoned(info.workspace_bytes + 64);
    buffers.workspace =
        reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(workspace.data()) + 63) / 64 * 64);
    buffers.workspace_bytes = info.workspace_bytes;
    ASSERT_EQ(tessera_run(&p, &kCpu, &buffers, &error), TESSERA_OK) << error.message;
  };
  run();
  p.pass = TESSERA_BACKWARD;
  if (a.deterministic) p.flags |= TESSERA_DETERMINISTIC;
  p.tensor[TESSERA_MAX_LOGIT] = {};
  plain(TESSERA_DO, "do"), plain(TESSERA_DQ, "dq"), plain(TESSERA_DK, "dk"),
      plain(TESSERA_DV, "dv");
  if (!a.bias_shape.empty()) {
    give(TESSERA_DBIAS, contiguous(dtype, a.bias_shape), v.flat.at("dbias").data());
  }
  if (a.softmax != NVTE_VANILLA_SOFTMAX) {
    give(TESSERA_DSINK, contiguous(TESSERA_FP32, {a.hq}), v.flat.at("dsink").data());
  }
  run();
}

// ---- the call under test ----

namespace {

using Parts = std::vector<Memory>;

// Moves q, k, v (or gradients) between plain bshd and the parts of a layout, row by row within the
// lengths, all rows where they do not count.
void move(const Stored& stored, const Attention& a, bool padding, Parts& parts,
          const std::vector<Plain*>& tensors, bool in) {
  for (int t = 0; t < static_cast<int>(tensors.size()); ++t) {
    Plain& plain = *tensors[static_cast<size_t>(t)];
    Memory& part = parts[static_cast<size_t>(stored.part(t))];
    for (int64_t n = 0; n < plain.b; ++n) {
      const auto length = (t ? a.k : a.q).lens[static_cast<size_t>(n)];
      const int64_t rows = padding ? length : plain.s;
      for (int64_t i = 0; i < rows; ++i)
        for (int64_t h = 0; h < plain.h; ++h)
          for (int64_t e = 0; e < plain.d; ++e) {
            uint8_t *x = plain.at(n, i, h, e), *y = part.at(stored.offset(t, n, i, h, e));
            std::memcpy(in ? y : x, in ? x : y, static_cast<size_t>(part.size()));
          }
    }
  }
}

Parts parts_of(const Stored& stored, DType dtype) {
  Parts parts;
  for (int part = 0; part <= stored.part(2); ++part)
    parts.emplace_back(dtype, stored.part_numel(part));
  return parts;
}

// The tensor of q, k or v in its part.
TensorWrapper tensor_in(const Stored& stored, Parts& parts, int t, bool flat) {
  Memory& part = parts[static_cast<size_t>(stored.part(t))];
  std::vector<size_t> shape = stored.shape(t);
  if (flat && shape.size() == 4) shape = {shape[0] * shape[1], shape[2], shape[3]};
  return {part.at(stored.first(t)), shape, part.dtype};
}

// The two calls of a pass. The workspace is at an odd address, with not a byte more than was asked
// for.
void call_twice(NvteCall& call, void (NvteCall::*pass)(),
                void (*between)(NvteCall&, Values&, Memory&), Values& values, Memory& stats) {
  call.workspace = TensorWrapper();
  (call.*pass)();
  ASSERT_EQ(call.workspace.dtype(), DType::kByte);
  ASSERT_EQ(call.workspace.ndim(), 1u);
  const size_t asked = call.workspace.numel();
  ASSERT_GE(asked, 1u);
  auto memory = poisoned(static_cast<int64_t>(asked));
  NvteCall::set(call.workspace, memory.data() + 1, DType::kByte, {asked});
  if (between) between(call, values, stats);
  (call.*pass)();
  for (size_t i = asked + 1; i < memory.size(); ++i) ASSERT_EQ(memory[i], 0xff);
}

// Memory for what the forward pass writes into its pack.
void give_pack(NvteCall& call, Values& values, Memory& stats) {
  const auto give = [&](size_t i, void* data) {
    NVTEBasicTensor basic = nvte_get_tensor_param(call.pack.tensors[i], kNVTERowwiseData);
    basic.data_ptr = data;
    nvte_set_tensor_param(&call.pack.tensors[i], kNVTERowwiseData, &basic);
  };
  if (call.training) {
    stats = Memory(DType::kFloat32, static_cast<int64_t>(nvte_tensor_numel(call.pack.tensors[0])));
    give(0, stats.data());
  }
  if (call.max_logit) give(1, values.flat.at("max").data());
}

// What does not depend on the layout.
void set_scores(NvteCall& call, const Attention& a, Values& v) {
  std::vector<size_t> bias_shape(a.bias_shape.begin(), a.bias_shape.end());
  if (bias_shape.empty()) bias_shape = {0};
  const std::vector<size_t> sink_shape{1, static_cast<size_t>(a.hq), 1, 1};
  NvteCall::set(call.bias, v.flat.at("bias").data(), a.dtype, bias_shape);
  NvteCall::set(call.dbias, v.flat.at("dbias").data(), a.dtype, bias_shape);
  NvteCall::set(call.softmax_offset, v.flat.at("sink").data(), DType::kFloat32, sink_shape);
  const bool sink = a.softmax != NVTE_VANILLA_SOFTMAX;
  NvteCall::set(call.dsoftmax_offset, sink ? v.flat.at("dsink").data() : nullptr, DType::kFloat32,
                sink_shape);
  call.bias_type = a.bias, call.mask = a.mask, call.softmax = a.softmax;
  call.left = a.left, call.right = a.right, call.bottom_right = a.bottom_right;
  call.scale = a.scale, call.dropout = a.dropout;
  call.max_logit = a.max_logit, call.deterministic = a.deterministic;
  call.max_q = static_cast<size_t>(a.sq), call.max_kv = static_cast<size_t>(a.sk);
}

// lse to [b, h, s], from that or from [h, t] of packed tokens.
void read_stats(const Stored& stored, const Attention& a, bool padding, Memory& stats,
                Memory& lse) {
  const std::vector<int32_t> at = a.q.cu(a.q.gap);
  const auto tokens = static_cast<int64_t>(stored.shape(0)[0]);
  for (int64_t n = 0; n < a.q.b(); ++n) {
    const int64_t rows = padding ? a.q.lens[static_cast<size_t>(n)] : a.sq;
    for (int64_t h = 0; h < a.hq; ++h) {
      const int64_t to = (n * a.hq + h) * a.sq;
      const int64_t from = stored.packed(0) ? h * tokens + at[static_cast<size_t>(n)] : to;
      for (int64_t i = 0; i < rows; ++i) std::memcpy(lse.at(to + i), stats.at(from + i), 4);
    }
  }
}

}  // namespace

void run_through(const Through& through, const Attention& a, Values& v) {
  const std::string name = kLayoutNames[through.layout];
  const bool paged = name.rfind("paged", 0) == 0, flat = through.flat_shapes;
  const Stored stored(name, a, a.dqk, a.dv, paged ? kPageSize : 0);
  // o and do have q's format and v's head dim.
  const std::string q_format = stored.packed(0)                     ? "thd"
                               : name.rfind("bhsd", 0) == 0         ? "bhsd"
                               : name.find("sb") == (paged ? 9 : 0) ? "sbhd"
                                                                    : "bshd";
  const Stored output(q_format + "_thd_thd", a, a.dv, a.dv);
  const bool padding = is_padding(a.mask) || stored.packed(0) || paged;
  Parts inputs = parts_of(stored, a.dtype), gradients = inputs;
  Parts o{Memory(a.dtype, output.part_numel(0))}, d_o = o;
  move(stored, a, padding, inputs, {&v.plain.at("q"), &v.plain.at("k"), &v.plain.at("v")}, true);
  std::vector<int32_t> cu_q = a.q.cu(), cu_k = a.k.cu(), at_q = a.q.cu(a.q.gap),
                       at_k = a.k.cu(a.k.gap);
  int64_t rng[2] = {kRngState[0], kRngState[1]};
  NvteCall call;
  set_scores(call, a, v);
  call.layout = call.dqkv_layout = through.layout;
  call.training = through.is_training, call.second = through.second;
  call.q = tensor_in(stored, inputs, 0, flat), call.k = tensor_in(stored, inputs, 1, flat);
  call.v = tensor_in(stored, inputs, 2, flat), call.o = tensor_in(output, o, 0, flat);
  NvteCall::set(call.rng_state, rng, DType::kInt64, {2});
  NvteCall::set(call.cu_q, cu_q.data(), DType::kInt32, {cu_q.size()});
  NvteCall::set(call.cu_kv, cu_k.data(), DType::kInt32, {cu_q.size()});
  if (a.q.gap) {
    NvteCall::set(call.padded_q, at_q.data(), DType::kInt32, {cu_q.size()});
    NvteCall::set(call.padded_kv, at_k.data(), DType::kInt32, {cu_q.size()});
  }
  std::vector<int32_t> table = paged ? stored.table() : std::vector<int32_t>{};
  if (paged) {
    NvteCall::set(call.table_k, table.data(), DType::kInt32,
                  {cu_q.size() - 1, static_cast<size_t>(stored.max_pages())});
  }
  Memory stats(DType::kFloat32, 0);
  call_twice(call, &NvteCall::forward, give_pack, v, stats);
  move(output, a, padding, o, {&v.plain.at("o")}, false);
  if (!through.is_training) return;
  read_stats(stored, a, padding, stats, v.flat.at("lse"));
  if (paged) return;
  move(output, a, padding, d_o, {&v.plain.at("do")}, true);
  call.d_o = tensor_in(output, d_o, 0, flat), call.dq = tensor_in(stored, gradients, 0, flat);
  call.dk = tensor_in(stored, gradients, 1, flat), call.dv = tensor_in(stored, gradients, 2, flat);
  call_twice(call, &NvteCall::backward, nullptr, v, stats);
  move(stored, a, padding, gradients, {&v.plain.at("dq"), &v.plain.at("dk"), &v.plain.at("dv")},
       false);
}

void expect_equal(const Attention& a, Values& expected, Values& got, bool backward) {
  std::vector<const char*> names{"o"};
  if (backward) names.insert(names.end(), {"dq", "dk", "dv"});
  for (const char* name : names) {
    Plain &x = expected.plain.at(name), &y = got.plain.at(name);
    const bool of_keys = name[1] == 'k' || name[1] == 'v';
    const std::vector<int32_t>& lens = of_keys ? a.k.lens : a.q.lens;
    for (int64_t n = 0; n < x.b; ++n) {
      const int64_t rows = is_padding(a.mask) ? lens[static_cast<size_t>(n)] : x.s;
      ASSERT_EQ(std::memcmp(x.at(n, 0, 0, 0), y.at(n, 0, 0, 0),
                            static_cast<size_t>(rows * x.h * x.d * x.memory.size())),
                0)
          << name << " of sequence " << n;
    }
  }
  for (int64_t row = 0; row < a.q.b() * a.hq; ++row) {
    const int64_t n = row / a.hq,
                  rows = is_padding(a.mask) ? a.q.lens[static_cast<size_t>(n)] : a.sq;
    ASSERT_EQ(std::memcmp(expected.flat.at("lse").at(row * a.sq), got.flat.at("lse").at(row * a.sq),
                          static_cast<size_t>(rows * 4)),
              0)
        << "lse of sequence " << n;
  }
  for (const char* name : {"max", "dbias", "dsink"}) {
    if (!backward && name[0] == 'd') continue;
    EXPECT_EQ(expected.flat.at(name).bytes, got.flat.at(name).bytes) << name;
  }
}

}  // namespace nvte_test
