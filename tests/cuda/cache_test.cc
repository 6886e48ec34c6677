// SPDX-License-Identifier: Apache-2.0
// tessera_rotate and tessera_append as a GPU runs them, every thread of a launch by turns on the
// host, beside the CPU's engine; and what only a GPU may meet, since the CPU refuses it: tokens
// without a place. Needs no GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "cuda/common/cache/move.cuh"

namespace tessera::cuda {
namespace {

constexpr uint8_t kUntouched = 0xA5;

int bytes_of(int dtype) {
  switch (dtype) {
    case TESSERA_FP32:
    case TESSERA_INT32:
      return 4;
    case TESSERA_INT64:
      return 8;
    case TESSERA_BF16:
    case TESSERA_FP16:
      return 2;
  }
  return 1;
}

// What move_kernel does, one thread after the other.
void run_on_host(const MoveLaunch& m) {
  for (int64_t t = 0; t < m.tokens; ++t) {
    const Token token = token_of(m, t);
    if (!token.exists) continue;
    for (int unit = 0; unit < m.heads * m.pieces; ++unit) {
      m.width == 8 ? move_unit<8>(m, token, unit) : move_unit<1>(m, token, unit);
    }
  }
}

struct Array {
  tessera_tensor tensor{};
  std::vector<uint8_t> bytes;

  void* data() { return bytes.data() + (16 - reinterpret_cast<uintptr_t>(bytes.data()) % 16) % 16; }
  int64_t size() const { return static_cast<int64_t>(bytes.size()) - 16; }
  std::vector<uint8_t> contents() {
    const auto* begin = static_cast<uint8_t*>(data());
    return {begin, begin + size()};
  }
};

// Contiguous, all bytes kUntouched; `slack` more elements a row.
Array array(int dtype, std::vector<int64_t> extents, int64_t slack = 0) {
  Array a;
  a.tensor.dtype = dtype;
  int64_t step = 1;
  for (int axis = 3; axis >= 0; --axis) {
    const bool there = axis < static_cast<int>(extents.size());
    a.tensor.extent[axis] = there ? extents[axis] : 1;
    if (!there) continue;
    a.tensor.stride[axis] = step;
    step *= extents[axis] + (axis + 1 == static_cast<int>(extents.size()) ? slack : 0);
  }
  a.bytes.assign(step * bytes_of(dtype) + 16, kUntouched);
  return a;
}

class CacheTest : public ::testing::Test {
 protected:
  int64_t pick(int64_t lo, int64_t hi) {
    return std::uniform_int_distribution<int64_t>(lo, hi)(random_);
  }
  bool chance() { return pick(0, 1) == 1; }

  void fill(Array& a) {
    std::normal_distribution<float> normal;
    const int64_t count = a.size() / bytes_of(a.tensor.dtype);
    for (int64_t i = 0; i < count; ++i) {
      const float x = normal(random_) * (i % 97 == 0 ? 1e3f : 1.f);
      float* to = static_cast<float*>(a.data());
      if (a.tensor.dtype == TESSERA_FP32) {
        to[i] = x;
      } else if (a.tensor.dtype == TESSERA_BF16) {
        reinterpret_cast<__nv_bfloat16*>(to)[i] = __float2bfloat16_rn(x);
      } else {
        reinterpret_cast<__half*>(to)[i] = __float2half_rn(x);
      }
    }
  }
  Array integers(int dtype, std::vector<int64_t> extents, const std::vector<int64_t>& values) {
    Array a = array(dtype, extents);
    for (size_t i = 0; i < values.size(); ++i) {
      if (dtype == TESSERA_INT32) {
        static_cast<int32_t*>(a.data())[i] = static_cast<int32_t>(values[i]);
      } else {
        static_cast<int64_t*>(a.data())[i] = values[i];
      }
    }
    return a;
  }

  // body() with other numbers, until a check in it fails.
  template <typename Body>
  void for_seeds(unsigned count, const Body& body) {
    for (unsigned seed = 0; seed < count && !HasFailure(); ++seed) {
      SCOPED_TRACE("seed " + std::to_string(seed));
      random_.seed(seed);
      body();
    }
  }

  std::mt19937 random_;
};

// Equal bits, but for the last place of what turned: the CPU's compiler may fuse a multiply-add.
void expect_equal(Array& got, Array& expected) {
  const int dtype = got.tensor.dtype;
  const int64_t count = got.size() / bytes_of(dtype);
  const auto value = [&](Array& a, int64_t i) -> float {
    if (dtype == TESSERA_E4M3) return float(static_cast<const __nv_fp8_e4m3*>(a.data())[i]);
    if (dtype == TESSERA_E5M2) return float(static_cast<const __nv_fp8_e5m2*>(a.data())[i]);
    float x;
    load_piece<1>(static_cast<const char*>(a.data()), static_cast<int>(i), dtype, &x);
    return x;
  };
  const float last = dtype == TESSERA_FP32   ? 1e-6f
                     : dtype == TESSERA_BF16 ? 0x1p-7f
                     : dtype == TESSERA_FP16 ? 0x1p-10f
                     : dtype == TESSERA_E4M3 ? 0x1p-3f
                                             : 0x1p-2f;
  int64_t unequal = 0;
  for (int64_t i = 0; i < count; ++i) {
    const float a = value(got, i), b = value(expected, i);
    if (a == b || (std::isnan(a) && std::isnan(b))) continue;
    ++unequal;
    ASSERT_LE(std::abs(a - b), last * std::max(std::abs(b), 1e-2f)) << "element " << i;
  }
  EXPECT_LE(unequal, count / 20);
}

constexpr int kFloats[] = {TESSERA_FP32, TESSERA_BF16, TESSERA_FP16};

TEST_F(CacheTest, RotateIsThatOfTheCpu) {
  for_seeds(300, [&] {
    const int dtype = kFloats[pick(0, 2)];
    const int64_t b = pick(1, 3), s = pick(1, 5), h = pick(1, 3);
    const int64_t d = chance() ? 16 * pick(1, 6) : pick(2, 40), max_pos = 40;
    const int64_t half = d % 16 == 0 && chance() ? d / 16 * 8 : pick(1, d / 2);
    Array x = array(dtype, {b, s, h, d}, chance() ? 0 : pick(1, 8)), y = array(dtype, {b, s, h, d});
    Array cos = array(TESSERA_FP32, {max_pos, half}), sin = array(TESSERA_FP32, {max_pos, half});
    fill(x), fill(cos), fill(sin);
    const bool each = s > 1 && chance();
    std::vector<int64_t> where;
    for (int64_t i = 0; i < b * (each ? s : 1); ++i) where.push_back(pick(0, max_pos - s));
    Array positions = integers(chance() ? TESSERA_INT32 : TESSERA_INT64, {b, each ? s : 1}, where);

    tessera_rotate_args args{};
    args.struct_size = sizeof args;
    if (chance()) args.flags |= TESSERA_INTERLEAVED;
    if (chance()) args.flags |= TESSERA_INVERSE;
    const auto give = [&](int index, Array& a) {
      args.tensor[index] = a.tensor;
      args.data[index] = a.data();
    };
    give(TESSERA_ROTATE_X, x), give(TESSERA_ROTATE_Y, y);
    give(TESSERA_ROTATE_COS, cos), give(TESSERA_ROTATE_SIN, sin);
    if (chance()) give(TESSERA_ROTATE_POSITIONS, positions);

    Array expected = y;
    tessera_buffers context{};
    context.struct_size = sizeof context;
    tessera_error error{};
    error.struct_size = sizeof error;
    const tessera_device cpu{};
    args.data[TESSERA_ROTATE_Y] = expected.data();
    ASSERT_EQ(tessera_rotate(&args, &cpu, &context, &error), TESSERA_OK) << error.message;
    give(TESSERA_ROTATE_Y, y);
    run_on_host(launch_of(args));
    expect_equal(y, expected);

    give(TESSERA_ROTATE_Y, x);  // in place
    run_on_host(launch_of(args));
    for (int64_t n = 0; n < b * s * h; ++n) {
      const auto* row = static_cast<uint8_t*>(x.data()) + n * x.tensor.stride[2] * bytes_of(dtype);
      const auto* same = static_cast<uint8_t*>(y.data()) + n * d * bytes_of(dtype);
      ASSERT_TRUE(std::equal(row, row + d * bytes_of(dtype), same));
    }
  });
}

// A call of append with everything that it can have.
struct Append {
  tessera_append_args args{};
  Array k, v, q, q_out, k_cache, v_cache, starts, cu, counts, pages, k_scale, v_scale, cos, sin;
};

class AppendTest : public CacheTest {
 protected:
  Append draw() {
    Append a;
    const bool packed = chance(), paged = chance();
    const int dtype = kFloats[pick(0, 2)];
    const int caches[] = {dtype, TESSERA_BF16, TESSERA_E4M3, TESSERA_E5M2};
    const int cache = caches[pick(0, 3)];
    const int64_t b = pick(1, 4), s = pick(1, 5), hk = pick(1, 3), hq = pick(1, 5),
                  page = pick(1, 4);
    const int64_t d = chance() ? 16 * pick(1, 4) : pick(2, 30);
    const int64_t dv = d % 16 == 0 ? 16 * pick(1, 4) : pick(1, 30), max_pages = 12 / page + 3;
    const int64_t capacity = paged ? max_pages * page : pick(6, 14);
    std::vector<int64_t> starts, counts, cu{0}, table;
    for (int64_t n = 0; n < b; ++n) {
      counts.push_back(pick(0, s));
      cu.push_back(cu.back() + counts.back());
      starts.push_back(pick(0, capacity - s));
    }
    const int64_t rows = packed ? cu.back() + pick(0, 2) : s, batch = packed ? 1 : b;
    const int64_t pool = b * max_pages + 2;
    for (int64_t i = 0; i < b * max_pages; ++i) table.push_back(i + 1);
    std::shuffle(table.begin(), table.end(), random_);
    a.k = array(dtype, {batch, rows, hk, d});
    a.v = array(dtype, {batch, rows, hk, dv}, chance() ? 0 : 8);
    a.q = array(dtype, {batch, rows, hq, d});
    a.q_out = array(dtype, {batch, rows, hq, d});
    a.k_cache = array(cache, {paged ? pool : b, paged ? page : capacity, hk, d});
    a.v_cache = array(cache, {paged ? pool : b, paged ? page : capacity, hk, dv});
    for (Array* filled : {&a.k, &a.v, &a.q}) fill(*filled);
    const int integer = chance() ? TESSERA_INT32 : TESSERA_INT64;
    a.starts = integers(integer, {b}, starts);
    a.cu = integers(integer, {b + 1}, cu);
    a.counts = integers(integer, {b}, counts);
    a.pages = integers(TESSERA_INT32, {b, max_pages}, table);
    const int64_t half = d % 16 == 0 && chance() ? d / 2 : pick(1, d / 2), most = capacity;
    a.cos = array(TESSERA_FP32, {most, half}), a.sin = array(TESSERA_FP32, {most, half});
    fill(a.cos), fill(a.sin);
    a.k_scale = array(TESSERA_FP32, {chance() ? b : 1, hk});
    a.v_scale = a.k_scale;
    for (Array* scale : {&a.k_scale, &a.v_scale}) {
      for (int64_t i = 0; i < scale->size() / 4; ++i) {
        static_cast<float*>(scale->data())[i] = 0.01f * static_cast<float>(pick(1, 300));
      }
    }
    a.args.struct_size = sizeof a.args;
    a.args.format = packed ? TESSERA_THD : TESSERA_BSHD;
    if (chance()) a.args.flags = TESSERA_INTERLEAVED;
    const bool turns = chance(), mla = chance(),
               fp8 = cache == TESSERA_E4M3 || cache == TESSERA_E5M2;
    used_ = {TESSERA_APPEND_K, TESSERA_APPEND_K_CACHE, TESSERA_APPEND_SEQLENS};
    const auto also = [&](bool when, std::initializer_list<int> more) {
      if (when) used_.insert(used_.end(), more);
    };
    also(!mla, {TESSERA_APPEND_V, TESSERA_APPEND_V_CACHE});
    also(packed, {TESSERA_APPEND_CU_SEQLENS});
    also(!packed && chance(), {TESSERA_APPEND_SEQLENS_Q});
    also(paged, {TESSERA_APPEND_PAGE_TABLE});
    also(fp8, {TESSERA_APPEND_K_SCALE});
    also(fp8 && !mla, {TESSERA_APPEND_V_SCALE});
    also(turns, {TESSERA_APPEND_COS, TESSERA_APPEND_SIN, TESSERA_APPEND_Q, TESSERA_APPEND_Q_OUT});
    return a;
  }

  void point(Append& a) {
    Array* all[] = {&a.k,       &a.v,       &a.k_cache, &a.v_cache, &a.starts, &a.cu,    &a.pages,
                    &a.k_scale, &a.v_scale, &a.cos,     &a.sin,     &a.q,      &a.q_out, &a.counts};
    for (const int index : used_) {
      a.args.tensor[index] = all[index]->tensor;
      a.args.data[index] = all[index]->data();
    }
  }

  std::vector<int> used_;
};

TEST_F(AppendTest, AppendIsThatOfTheCpu) {
  for_seeds(500, [&] {
    Append a = draw(), expected = a;
    point(expected), point(a);
    tessera_buffers context{};
    context.struct_size = sizeof context;
    tessera_error error{};
    error.struct_size = sizeof error;
    const tessera_device cpu{};
    ASSERT_EQ(tessera_append(&expected.args, &cpu, &context, &error), TESSERA_OK) << error.message;
    run_on_host(launch_of(a.args));
    expect_equal(a.k_cache, expected.k_cache);
    expect_equal(a.v_cache, expected.v_cache);
    expect_equal(a.q_out, expected.q_out);
  });
}

// Lengths and pages that are wrong: nothing is written outside of the arrays (the sanitizers would
// see it, and the cache's other tokens are as they were), and tokens that do have a place get
// there.
TEST_F(AppendTest, TokensWithoutAPlaceAreDropped) {
  for_seeds(200, [&] {
    Append a = draw();
    point(a);
    if (a.args.tensor[TESSERA_APPEND_PAGE_TABLE].dtype != TESSERA_NONE) {
      auto* table = static_cast<int32_t*>(a.args.data[TESSERA_APPEND_PAGE_TABLE]);
      const int64_t count = a.pages.tensor.extent[0] * a.pages.tensor.extent[1];
      for (int64_t i = 0; i < count; ++i) table[i] = chance() ? -1 : INT32_MAX;
    } else {
      for (int64_t n = 0; n < a.starts.tensor.extent[0]; ++n) {
        const int64_t bad = chance() ? -7 : a.k_cache.tensor.extent[1];
        if (a.starts.tensor.dtype == TESSERA_INT32) {
          static_cast<int32_t*>(a.starts.data())[n] = static_cast<int32_t>(bad);
        } else {
          static_cast<int64_t*>(a.starts.data())[n] = bad;
        }
      }
    }
    const auto before = a.k_cache.contents();
    run_on_host(launch_of(a.args));
    EXPECT_EQ(a.k_cache.contents(), before);
  });
}

TEST(Rotate, PositionsBeyondTheTablesGiveNaN) {
  Array x = array(TESSERA_FP32, {1, 2, 1, 20}), y = x;
  Array cos = array(TESSERA_FP32, {1, 8}), sin = cos;
  for (Array* a : {&x, &cos, &sin}) {
    std::fill_n(static_cast<float*>(a->data()), a->size() / 4, 1.f);
  }
  tessera_rotate_args args{};
  args.struct_size = sizeof args;
  Array* all[] = {&x, &y, &cos, &sin};
  for (int i = 0; i < 4; ++i) args.tensor[i] = all[i]->tensor, args.data[i] = all[i]->data();
  run_on_host(launch_of(args));
  const auto* row = static_cast<const float*>(y.data());
  EXPECT_EQ(row[0], 0.f);
  EXPECT_EQ(row[19], 1.f);
  for (int i = 20; i < 40; ++i) EXPECT_TRUE(std::isnan(row[i])) << i;
}

}  // namespace
}  // namespace tessera::cuda
