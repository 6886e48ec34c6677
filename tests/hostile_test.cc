// SPDX-License-Identifier: Apache-2.0
// Callers who are wrong, through the C header: each call is one clear error, writes nothing, and
// does not crash. Sanitizers show that not a byte is read that is not the caller's.
#include <gtest/gtest.h>

#include <climits>
#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

#include "tensor.h"
#include "tessera.h"

namespace {

constexpr tessera_device kCpu{TESSERA_CPU, 0, 0, 0};
constexpr int64_t kB = 2, kS = 5, kH = 2, kD = 8, kCount = kB * kS * kH * kD;

// A small legal forward call, to be spoilt. Outputs hold 7 until a run succeeds.
struct Call {
  tessera_problem p{};
  tessera_buffers b{};
  tessera_device device = kCpu;
  std::vector<float> inputs[3], o, lse;
  std::vector<int32_t> lengths{5, 3, 0}, table{0, 1, 1, 0};
  std::vector<int64_t> rng{1, 2};
  alignas(64) char workspace[1 << 18];

  Call() {
    p.struct_size = sizeof p, b.struct_size = sizeof b;
    for (int i : {TESSERA_Q, TESSERA_K, TESSERA_V}) {
      inputs[i].assign(kCount, 0.5f);
      give(i, tensor(TESSERA_FP32, {kB, kS, kH, kD}), inputs[i].data());
    }
    o.assign(kCount, 7), lse.assign(kB * kH * kS, 7);
    give(TESSERA_O, tensor(TESSERA_FP32, {kB, kS, kH, kD}), o.data());
    give(TESSERA_LSE, tensor(TESSERA_FP32, {kB, kH, kS}), lse.data());
    b.workspace = workspace, b.workspace_bytes = sizeof workspace;
  }
  void give(int index, const tessera_tensor& t, void* data) {
    p.tensor[index] = t, b.data[index] = data;
  }
  void packed(int32_t t) {
    p.format_q = p.format_kv = TESSERA_THD;
    for (int i : {TESSERA_Q, TESSERA_K, TESSERA_V, TESSERA_O})
      p.tensor[i] = tensor(TESSERA_FP32, {1, t, kH, kD});
    p.tensor[TESSERA_LSE] = tensor(TESSERA_FP32, {1, kH, t});
    for (int i : {TESSERA_CU_SEQLENS_Q, TESSERA_CU_SEQLENS_K})
      give(i, tensor(TESSERA_INT32, {3}), lengths.data());
  }
  void paged() {
    give(TESSERA_PAGE_TABLE_K, tensor(TESSERA_INT32, {kB, 2}), table.data());
    lengths = {10, 6, 0};
    give(TESSERA_SEQLENS_K, tensor(TESSERA_INT32, {kB}), lengths.data());
  }
};

TEST(Hostile, TheCallToSpoilIsLegal) {
  for (void (*change)(Call&) : {+[](Call&) {},
                                +[](Call& c) {
                                  c.lengths = {0, 3, 8}, c.packed(8);
                                },
                                +[](Call& c) { c.paged(); }}) {
    Call c;
    change(c);
    tessera_error e{};
    e.struct_size = sizeof e;
    EXPECT_EQ(tessera_run(&c.p, &c.device, &c.b, &e), TESSERA_OK) << e.message;
    EXPECT_EQ(c.o[0], 0.5f);
  }
}

struct Spoilt {
  const char* name;
  const char* says;  // part of the message: the name and the value
  void (*spoil)(Call& c);
};
void PrintTo(const Spoilt& s, std::ostream* os) { *os << s.name; }

class Hostile : public testing::TestWithParam<Spoilt> {};

TEST_P(Hostile, IsOneClearErrorAndWritesNothing) {
  Call c;
  GetParam().spoil(c);
  // Described or not, what is spoilt is never written over by tessera_outputs that fails.
  const tessera_problem spoilt = c.p;
  const int32_t wanted[] = {TESSERA_O, TESSERA_LSE};
  if (tessera_outputs(&c.p, wanted, 2, nullptr) != TESSERA_OK) {
    EXPECT_EQ(std::memcmp(&c.p, &spoilt, sizeof spoilt), 0);
  }
  c.p = spoilt;
  tessera_error e{};
  e.struct_size = sizeof e;
  EXPECT_EQ(tessera_run(&c.p, &c.device, &c.b, &e), TESSERA_INVALID);
  EXPECT_EQ(e.code, TESSERA_INVALID);
  const std::string message = e.message;
  EXPECT_TRUE(message.starts_with("tessera.attention: ")) << message;
  EXPECT_NE(message.find(GetParam().says), std::string::npos) << message;
  EXPECT_EQ(message.find('\n'), std::string::npos) << message;
  EXPECT_EQ(tessera_run(&c.p, &c.device, &c.b, nullptr), TESSERA_INVALID);
  for (float x : c.o) ASSERT_EQ(x, 7);
  for (float x : c.lse) ASSERT_EQ(x, 7);
}

#define SPOIL(name, says, ...)               \
  Spoilt {                                   \
    name, says, [](Call& c) { __VA_ARGS__; } \
  }

INSTANTIATE_TEST_SUITE_P(
    Calls, Hostile,
    testing::Values(
        // structs
        SPOIL("problem size 0", "problem.struct_size=0", c.p.struct_size = 0),
        SPOIL("problem size odd", "problem.struct_size=3", c.p.struct_size = 3),
        SPOIL("problem size huge", "problem.struct_size=4294967295", c.p.struct_size = UINT_MAX),
        SPOIL("buffers size 0", "buffers.struct_size=0", c.b.struct_size = 0),
        SPOIL("buffers size huge", "buffers.struct_size=4000000000", c.b.struct_size = 4000000000u),
        SPOIL("reserved", "reserved=5", c.p.reserved[3] = 5),
        SPOIL("tensor reserved", "k.reserved=9", c.p.tensor[TESSERA_K].reserved = 9),
        SPOIL("buffers reserved", "buffers.reserved=5", c.b.reserved[0] = 5),
        // enums and flags
        SPOIL("flags", "flags=0x80000000", c.p.flags = 1u << 31),
        SPOIL("pass", "pass=2", c.p.pass = 2), SPOIL("align", "align=-1", c.p.align = -1),
        SPOIL("format", "layout=4", c.p.format_q = 4),
        SPOIL("format kv", "layout=-7", c.p.format_kv = -7),
        SPOIL("dtype", "v.dtype=10", c.p.tensor[TESSERA_V].dtype = 10),
        SPOIL("dtype negative", "v.dtype=-1", c.p.tensor[TESSERA_V].dtype = -1),
        SPOIL("q bool", "q.dtype=", c.p.tensor[TESSERA_Q].dtype = TESSERA_BOOL),
        SPOIL("device kind", "device.kind=9", c.device.kind = 9),
        SPOIL("device reserved", "reserved=1", c.device.reserved = 1),
        SPOIL("backend without end", "backend=", memset(c.p.backend, 'x', sizeof c.p.backend)),
        // shapes and strides
        SPOIL("no q", "q=None", c.p.tensor[TESSERA_Q].dtype = 0),
        SPOIL("negative extent", "q.shape=[2, -5, 2, 8]", c.p.tensor[TESSERA_Q].extent[1] = -5),
        SPOIL("least extent", "-9223372036854775808", c.p.tensor[TESSERA_Q].extent[0] = INT64_MIN),
        SPOIL("zero heads", "q.shape=[2, 5, 0, 8]", c.p.tensor[TESSERA_Q].extent[2] = 0),
        SPOIL("product overflows", ".shape=",
              for (int i
                   : {TESSERA_Q, TESSERA_O}) c.p.tensor[i]
                  .extent[0] = INT64_MAX / 2),
        SPOIL("strides overflow", "q.shape=[2, 5, 2, 8]",
              c.p.tensor[TESSERA_Q].stride[0] = INT64_MAX),
        SPOIL("negative stride", "k.stride", c.p.tensor[TESSERA_K].stride[1] = -16),
        SPOIL("last stride", "v.stride", c.p.tensor[TESSERA_V].stride[3] = 2),
        SPOIL("expanded output", "o.stride", c.p.tensor[TESSERA_O].stride[0] = 0),
        SPOIL("output over itself", "o.stride", c.p.tensor[TESSERA_O].stride[1] = 15),
        SPOIL("heads do not divide", "k.shape=[2, 5, 3, 8]",
              for (int i
                   : {TESSERA_K, TESSERA_V}) c.p.tensor[i]
                  .extent[2] = 3),
        // pointers
        SPOIL("null q", "q.data=NULL", c.b.data[TESSERA_Q] = nullptr),
        SPOIL("null o", "o.data=NULL", c.b.data[TESSERA_O] = nullptr),
        SPOIL("misaligned", "k.data=0x",
              c.b.data[TESSERA_K] = reinterpret_cast<char*>(c.b.data[TESSERA_K]) + 2),
        SPOIL("o is q", "o.data=0x", c.b.data[TESSERA_O] = c.b.data[TESSERA_Q]),
        SPOIL("lse in o", "lse", c.b.data[TESSERA_LSE] = c.o.data() + 3),
        SPOIL("end of memory", "q.data=0xfffffffffffff000",
              c.b.data[TESSERA_Q] = reinterpret_cast<void*>(~uintptr_t{0xFFF})),
        SPOIL("workspace negative", "workspace_bytes=-1", c.b.workspace_bytes = -1),
        SPOIL("workspace in o", "workspace=0x", c.b.workspace = c.o.data(),
              c.b.workspace_bytes = 64),
        // scalars
        SPOIL("threads", "num_threads=-3", c.b.num_threads = -3),
        SPOIL("scale NaN", "softmax_scale=nan", c.p.flags |= TESSERA_SOFTMAX_SCALE,
              c.b.softmax_scale = std::fabs(NAN)),
        SPOIL("scale negative", "softmax_scale=-1", c.p.flags |= TESSERA_SOFTMAX_SCALE,
              c.b.softmax_scale = -1),
        SPOIL("scale infinite", "softmax_scale=inf", c.p.flags |= TESSERA_SOFTMAX_SCALE,
              c.b.softmax_scale = INFINITY),
        SPOIL("softcap 0", "softcap=0", c.p.flags |= TESSERA_SOFTCAP),
        SPOIL("dropout without state", "rng_state=None", c.p.flags |= TESSERA_DROPOUT),
        SPOIL("dropout 1", "dropout_p=1", c.p.flags |= TESSERA_DROPOUT, c.b.dropout_p = 1,
              c.give(TESSERA_RNG_STATE, tensor(TESSERA_INT64, {2}), c.rng.data())),
        SPOIL("dropout NaN", "dropout_p=nan", c.p.flags |= TESSERA_DROPOUT,
              c.b.dropout_p = std::fabs(NAN),
              c.give(TESSERA_RNG_STATE, tensor(TESSERA_INT64, {2}), c.rng.data())),
        SPOIL("window", "window=(-2, 0)", c.p.flags |= TESSERA_WINDOW, c.p.window_left = -2),
        SPOIL("causal to the right", "window=(0, 1)", c.p.flags |= TESSERA_WINDOW | TESSERA_CAUSAL,
              c.p.window_right = 1),
        // lengths and pages
        SPOIL("length beyond", "seqlens_k[0]=6", c.lengths = {6, 3},
              c.give(TESSERA_SEQLENS_K, tensor(TESSERA_INT32, {kB}), c.lengths.data())),
        SPOIL("length negative", "seqlens_k[1]=-1", c.lengths = {5, -1},
              c.give(TESSERA_SEQLENS_K, tensor(TESSERA_INT32, {kB}), c.lengths.data())),
        SPOIL("packed begins late", "cu_seqlens_q[0]=1", c.lengths = {1, 3, 8}, c.packed(8)),
        SPOIL("packed descends", "cu_seqlens_q[2]=3", c.lengths = {0, 5, 3}, c.packed(8)),
        SPOIL("packed negative", "cu_seqlens_q[1]=-5", c.lengths = {0, -5, 8}, c.packed(8)),
        SPOIL("packed too long", "cu_seqlens_q[2]=9", c.lengths = {0, 3, 9}, c.packed(8)),
        SPOIL("max_seqlen", "max_seqlen_q=2", c.lengths = {0, 3, 8}, c.packed(8),
              c.p.flags |= TESSERA_MAX_SEQLEN_Q, c.p.max_seqlen_q = 2),
        SPOIL("page beyond", "page_table[0, 1]=2", c.paged(), c.table[1] = 2),
        SPOIL("page negative", "page_table[1, 0]=-1", c.paged(), c.table[2] = -1)));

// ---- the other doors ----

struct Error : tessera_error {
  Error() : tessera_error{} { struct_size = sizeof(tessera_error); }
  bool says(const char* text) const { return std::strstr(message, text) != nullptr; }
};

TEST(HostileDoors, NullsAreErrors) {
  Call c;
  Error e;
  EXPECT_EQ(tessera_run(nullptr, &kCpu, &c.b, &e), TESSERA_INVALID);
  EXPECT_EQ(tessera_run(&c.p, nullptr, &c.b, &e), TESSERA_INVALID);
  EXPECT_EQ(tessera_run(&c.p, &kCpu, nullptr, &e), TESSERA_INVALID);
  EXPECT_EQ(tessera_run(nullptr, nullptr, nullptr, nullptr), TESSERA_INVALID);
  EXPECT_EQ(tessera_validate(nullptr, nullptr, nullptr, nullptr), TESSERA_INVALID);
  EXPECT_EQ(tessera_prepare(nullptr, nullptr, 0, nullptr, nullptr), TESSERA_INVALID);
  EXPECT_EQ(tessera_backend_name(-1), nullptr);
  EXPECT_EQ(tessera_backend_name(INT_MAX), nullptr);
  tessera_info info{};
  EXPECT_EQ(tessera_prepare(&c.p, &kCpu, 0, &info, &e), TESSERA_INVALID);
  EXPECT_TRUE(e.says("info.struct_size=0")) << e.message;
}

TEST(HostileDoors, AnErrorStructOfAnotherSizeIsNotOverrun) {
  Call c;
  c.p.pass = 5;
  char bytes[sizeof(tessera_error) + 8];
  for (uint32_t size : {0u, 1u, 7u, 8u, 9u, 12u, 40u}) {
    std::memset(bytes, 0x5A, sizeof bytes);
    std::memcpy(bytes, &size, sizeof size);
    tessera_error e;
    std::memcpy(&e, bytes, sizeof e);
    EXPECT_EQ(tessera_run(&c.p, &kCpu, &c.b, &e), TESSERA_INVALID);
    std::memcpy(bytes, &e, sizeof e);
    for (size_t at = std::max<size_t>(size, 4); at < sizeof bytes; ++at) ASSERT_EQ(bytes[at], 0x5A);
  }
}

TEST(HostileDoors, ExplainHonoursEveryCapacity) {
  Error e;
  const char* text = "fwd bf16 b=2 s=64 h=2 d=64 causal";
  const int64_t needed = tessera_explain(nullptr, text, &kCpu, nullptr, 0, &e);
  ASSERT_GT(needed, 0) << e.message;
  std::vector<char> buffer(static_cast<size_t>(needed) + 1, 'Z');
  for (int64_t capacity :
       {int64_t{-1}, INT64_MIN, int64_t{0}, int64_t{1}, int64_t{2}, needed - 1, needed}) {
    std::fill(buffer.begin(), buffer.end(), 'Z');
    EXPECT_EQ(tessera_explain(nullptr, text, &kCpu, buffer.data(), capacity, &e), needed);
    const int64_t used = std::max<int64_t>(capacity, 0);
    for (size_t at = static_cast<size_t>(used); at < buffer.size(); ++at)
      ASSERT_EQ(buffer[at], 'Z');
    if (used == 0) continue;
    EXPECT_EQ(buffer[static_cast<size_t>(used) - 1], '\0');
  }
  EXPECT_EQ(tessera_explain(nullptr, nullptr, &kCpu, nullptr, 0, &e), -1);
  EXPECT_EQ(tessera_explain(nullptr, "fwd", &kCpu, nullptr, 0, &e), -1);
  EXPECT_TRUE(e.says("case 'fwd'")) << e.message;
  EXPECT_EQ(tessera_explain(nullptr, "fwd bf16 b=1099511627776 s=1099511627776 h=4 d=64", &kCpu,
                            nullptr, 0, nullptr),
            -1);
  EXPECT_GT(tessera_describe(nullptr, -5), 0);
}

TEST(HostileDoors, AMessageIsOneLineWhateverItQuotes) {
  Error e;
  for (const char* text : {"fwd\nbf16", "fwd bf16 b\n=2\x1b", "\n\n"}) {
    EXPECT_EQ(tessera_explain(nullptr, text, &kCpu, nullptr, 0, &e), -1);
    EXPECT_EQ(std::strpbrk(e.message, "\n\x1b"), nullptr) << e.message;
  }
  EXPECT_EQ(tessera_explain(nullptr, "fwd bf16 b\n=2", &kCpu, nullptr, 0, &e), -1);
  EXPECT_TRUE(e.says("'b\\n=2'")) << e.message;
  Call c;
  std::memcpy(c.p.backend, "a\nb", 4);
  EXPECT_EQ(tessera_run(&c.p, &kCpu, &c.b, &e), TESSERA_INVALID);
  EXPECT_TRUE(e.says("backend=\"a\\nb\"")) << e.message;
}

TEST(HostileDoors, MergeOfNonsense) {
  std::vector<float> part(kCount, 1), out(kCount, 7), row(kB * kH * kS, 0), rows(kB * kH * kS, 7);
  const tessera_tensor o = tensor(TESSERA_FP32, {kB, kS, kH, kD}),
                       lse = tensor(TESSERA_FP32, {kB, kH, kS});
  const tessera_tensor os[] = {o, o}, lses[] = {lse, lse};
  const void *parts[] = {part.data(), part.data()}, *row_parts[] = {row.data(), row.data()};
  Error e;
  const auto merge = [&](int64_t count, int32_t format, const tessera_tensor& to, void* o_out,
                         void* lse_out) {
    return tessera_merge(count, format, os, parts, lses, row_parts, &to, o_out, &lse, lse_out,
                         &kCpu, nullptr, &e);
  };
  ASSERT_EQ(merge(2, TESSERA_BSHD, o, out.data(), rows.data()), TESSERA_OK) << e.message;
  std::fill(out.begin(), out.end(), 7), std::fill(rows.begin(), rows.end(), 7);
  EXPECT_EQ(merge(0, TESSERA_BSHD, o, out.data(), rows.data()), TESSERA_INVALID);
  EXPECT_TRUE(e.says("tessera.merge: num_parts=0")) << e.message;
  EXPECT_EQ(merge(INT64_MIN, TESSERA_BSHD, o, out.data(), rows.data()), TESSERA_INVALID);
  EXPECT_EQ(merge(2, 17, o, out.data(), rows.data()), TESSERA_INVALID);
  EXPECT_TRUE(e.says("layout=17")) << e.message;
  EXPECT_EQ(merge(2, TESSERA_BSHD, o, part.data(), rows.data()), TESSERA_INVALID);
  EXPECT_TRUE(e.says("o.data=0x") && e.says("o_parts[0]")) << e.message;
  EXPECT_EQ(merge(2, TESSERA_BSHD, o, out.data(), out.data() + 1), TESSERA_INVALID);
  EXPECT_EQ(merge(2, TESSERA_BSHD, o, nullptr, rows.data()), TESSERA_INVALID);
  EXPECT_TRUE(e.says("o.data=NULL")) << e.message;
  tessera_tensor wide = o;
  wide.extent[0] = INT64_MAX;
  EXPECT_EQ(merge(2, TESSERA_BSHD, wide, out.data(), rows.data()), TESSERA_INVALID);
  parts[1] = nullptr;
  EXPECT_EQ(merge(2, TESSERA_BSHD, o, out.data(), rows.data()), TESSERA_INVALID);
  EXPECT_TRUE(e.says("o_parts[1].data=NULL")) << e.message;
  EXPECT_EQ(tessera_merge(2, 0, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr,
                          nullptr, &kCpu, nullptr, &e),
            TESSERA_INVALID);
  for (float x : out) ASSERT_EQ(x, 7);
  for (float x : rows) ASSERT_EQ(x, 7);
}

TEST(HostileDoors, DropoutMaskOfNonsense) {
  const int64_t state[] = {1, 2};
  uint8_t keep[16];
  std::memset(keep, 9, sizeof keep);
  Error e;
  const auto mask = [&](int64_t b, int64_t hq, int64_t sq, int64_t sk, double p,
                        const int64_t* rng) {
    return tessera_dropout_mask(b, hq, sq, sk, p, rng, keep, &kCpu, nullptr, &e);
  };
  EXPECT_EQ(mask(INT64_MAX, 2, 2, 2, 0.5, state), TESSERA_INVALID);
  EXPECT_TRUE(e.says("tessera.dropout_mask: keep.shape=[9223372036854775807, 2, 2, 2]"))
      << e.message;
  EXPECT_EQ(mask(int64_t{1} << 32, 1, 1, int64_t{1} << 32, 0.5, state), TESSERA_INVALID);
  EXPECT_EQ(mask(-1, 1, 2, 2, 0.5, state), TESSERA_INVALID);
  EXPECT_EQ(mask(1, 0, 2, 2, 0.5, state), TESSERA_INVALID);
  for (double p : {1.0, -0.1, 1e-9, 2.0, double{NAN}, double{INFINITY}}) {
    EXPECT_EQ(mask(1, 1, 4, 4, p, state), TESSERA_INVALID) << p;
    EXPECT_TRUE(e.says("dropout_p=")) << e.message;
  }
  EXPECT_EQ(mask(1, 1, 4, 4, 0.5, nullptr), TESSERA_INVALID);
  EXPECT_TRUE(e.says("rng_state=NULL")) << e.message;
  EXPECT_EQ(tessera_dropout_mask(1, 1, 4, 4, 0.5, state, nullptr, &kCpu, nullptr, &e),
            TESSERA_INVALID);
  for (uint8_t x : keep) ASSERT_EQ(x, 9);
  EXPECT_EQ(mask(1, 1, 4, 4, 0.5, state), TESSERA_OK) << e.message;
  EXPECT_EQ(mask(0, 1, 4, 4, 0.5, state), TESSERA_OK) << e.message;
}

// ---- the structs of the utilities: what has no meaning is 0 (docs/abi.md) ----

struct Rotation {
  std::vector<float> x = std::vector<float>(kCount, 1), y = std::vector<float>(kCount, 7);
  std::vector<float> cos = std::vector<float>(kS * kD / 2, 1),
                     sin = std::vector<float>(kS * kD / 2);
  tessera_rotate_args args{};
  tessera_buffers context{};
  Rotation() {
    args.struct_size = sizeof args, context.struct_size = sizeof context;
    args.tensor[TESSERA_ROTATE_X] = args.tensor[TESSERA_ROTATE_Y] =
        tensor(TESSERA_FP32, {kB, kS, kH, kD});
    args.tensor[TESSERA_ROTATE_COS] = args.tensor[TESSERA_ROTATE_SIN] =
        tensor(TESSERA_FP32, {kS, kD / 2});
    void* const data[] = {x.data(), y.data(), cos.data(), sin.data()};
    std::copy(std::begin(data), std::end(data), args.data);
  }
  int32_t run(Error& e) const { return tessera_rotate(&args, &kCpu, &context, &e); }
};

TEST(HostileDoors, WhatHasNoMeaningInAUtilityIsZero) {
  Error e;
  ASSERT_EQ(Rotation().run(e), TESSERA_OK) << e.message;
  const std::pair<const char*, void (*)(Rotation&)> spoilt[] = {
      {"flags=0x4", [](Rotation& r) { r.args.flags = 4; }},
      {"reserved_half=1", [](Rotation& r) { r.args.reserved_half = 1; }},
      {"args.reserved=2", [](Rotation& r) { r.args.reserved[3] = 2; }},
      {"x.reserved=3", [](Rotation& r) { r.args.tensor[0].reserved = 3; }},
      {"args.tensor[7]", [](Rotation& r) { r.args.tensor[7].dtype = TESSERA_FP32; }},
      {"args.tensor[5]", [](Rotation& r) { r.args.data[5] = r.x.data(); }},
      {"y.dtype=99", [](Rotation& r) { r.args.tensor[1].dtype = 99; }},
      {"num_threads=-5", [](Rotation& r) { r.context.num_threads = -5; }},
      {"buffers.reserved=1", [](Rotation& r) { r.context.reserved[1] = 1; }},
      {"reserved_half=9", [](Rotation& r) { r.context.reserved_half = 9; }},
      {"workspace_bytes=-1", [](Rotation& r) { r.context.workspace_bytes = -1; }},
  };
  for (const auto& [says, spoil] : spoilt) {
    Rotation r;
    spoil(r);
    EXPECT_EQ(r.run(e), TESSERA_INVALID) << says;
    EXPECT_TRUE(e.says(says)) << says << ": " << e.message;
    for (float y : r.y) ASSERT_EQ(y, 7);
  }
}

struct Appending {
  float k[4] = {1, 2, 3, 4}, cache[32] = {}, q[8] = {0, 4, 8, 12}, cos[8], sin[8] = {};
  int32_t held[1] = {0};
  tessera_append_args args{};
  Appending() {
    std::fill(cos, cos + 8, 1.0f);
    args.struct_size = sizeof args;
    give(TESSERA_APPEND_K, tensor(TESSERA_FP32, {1, 2, 1, 2}), k);
    give(TESSERA_APPEND_K_CACHE, tensor(TESSERA_FP32, {1, 4, 1, 2}), cache);
    give(TESSERA_APPEND_SEQLENS, tensor(TESSERA_INT32, {1}), held);
    give(TESSERA_APPEND_COS, tensor(TESSERA_FP32, {4, 1}), cos);
    give(TESSERA_APPEND_SIN, tensor(TESSERA_FP32, {4, 1}), sin);
    give(TESSERA_APPEND_Q, tensor(TESSERA_FP32, {1, 2, 1, 2}), q);
    give(TESSERA_APPEND_Q_OUT, tensor(TESSERA_FP32, {1, 2, 1, 2}), q);
  }
  void give(int index, const tessera_tensor& t, void* data) {
    args.tensor[index] = t, args.data[index] = data;
  }
  int32_t run(Error& e) const { return tessera_append(&args, &kCpu, nullptr, &e); }
};

TEST(HostileDoors, AnAppendIsSpoilt) {
  Error e;
  ASSERT_EQ(Appending().run(e), TESSERA_OK) << e.message;
  Appending strides;  // q turned in place, to other places
  strides.args.tensor[TESSERA_APPEND_Q_OUT].stride[1] = 4;
  EXPECT_EQ(strides.run(e), TESSERA_INVALID);
  EXPECT_TRUE(e.says("q_out.data=")) << e.message;
  Appending flag;
  flag.args.flags = TESSERA_INVERSE;
  EXPECT_EQ(flag.run(e), TESSERA_INVALID);
  EXPECT_TRUE(e.says("flags=0x2")) << e.message;
  Appending unknown;
  unknown.args.tensor[15].dtype = TESSERA_INT32;
  EXPECT_EQ(unknown.run(e), TESSERA_INVALID);
  Appending pages;  // more places than 63 bits count
  int32_t table[1] = {0};
  tessera_tensor many = tensor(TESSERA_INT32, {1, int64_t{1} << 60});
  many.stride[1] = 0;
  pages.args.tensor[TESSERA_APPEND_K_CACHE] = tensor(TESSERA_FP32, {1, 16, 1, 2});
  pages.give(TESSERA_APPEND_PAGE_TABLE, many, table);
  EXPECT_EQ(pages.run(e), TESSERA_OK) << e.message;
}

}  // namespace
