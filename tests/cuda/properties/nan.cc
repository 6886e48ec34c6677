// SPDX-License-Identifier: Apache-2.0
// What becomes of a NaN in q, k or v (docs/semantics.md): it reaches the rows that see it, with a
// softcap too, and no row beyond a length, which is 0 whatever its neighbours hold.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "properties.h"

namespace tessera_test {
namespace {

constexpr int kHere = 5;  // row, key or column of the NaN: seen by all rows but for a causal mask
constexpr int kMissing =
    49;  // rows and keys of a sequence that its lengths leave out, or all but 1

// A problem of padded sequences with lengths of their own on each side: of the first some of its
// rows and keys are missing, of the second all rows.
class Spoilt {
 public:
  explicit Spoilt(const Options& options) : attention_(options) {
    const Options& o = attention_.options;
    len_q_ = static_cast<int32_t>(std::max<int64_t>(o.sq - kMissing, std::min<int64_t>(o.sq, 3)));
    len_k_ = static_cast<int32_t>(o.sk - kMissing / 2);
    std::vector<int32_t> of_q(static_cast<size_t>(o.b), 0), of_k(of_q.size(), len_k_);
    of_q[0] = len_q_;
    attention_.give(TESSERA_SEQLENS_Q, TESSERA_INT32, {o.b}, of_q.data());
    attention_.give(TESSERA_SEQLENS_K, TESSERA_INT32, {o.b}, of_k.data());
    attention_.prepare();
  }

  // NaN in one element of head 0 of the first sequence.
  void spoil(int index, int64_t row, int64_t column) {
    const tessera_tensor& t = attention_.problem.tensor[index];
    const int64_t size = bytes_of(t.dtype), at = row * t.stride[1] + column;
    require(cudaMemset(static_cast<char*>(attention_.buffers.data[index]) + at * size, 0xFF,
                       static_cast<size_t>(size)),
            "cudaMemset");
  }

  void run() {
    attention_.spoil();
    attention_.run();
    require(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    attention_.check_guards();
  }

  // An output's elements as they lie; bshd, or [b, hq, sq] for lse.
  std::vector<float> values(int index) const {
    const tessera_tensor& t = attention_.problem.tensor[index];
    const int64_t size = bytes_of(t.dtype);
    const auto count = static_cast<size_t>(t.extent[0] * t.extent[1] * t.extent[2] * t.extent[3]);
    std::vector<char> raw(count * static_cast<size_t>(size));
    require(
        cudaMemcpy(raw.data(), attention_.buffers.data[index], raw.size(), cudaMemcpyDeviceToHost),
        "cudaMemcpy");
    std::vector<float> values(count);
    for (size_t i = 0; i < count; ++i)
      values[i] = load(&raw[i * static_cast<size_t>(size)], t.dtype);
    return values;
  }

  // Calls body(n, row, head, element 0 of the row, elements) for the rows of a bshd output.
  template <typename Body>
  void for_each_row(int index, const Body& body) const {
    const tessera_tensor& t = attention_.problem.tensor[index];
    const std::vector<float> all = values(index);
    const float* row = all.data();
    for (int64_t n = 0; n < t.extent[0]; ++n) {
      for (int64_t i = 0; i < t.extent[1]; ++i) {
        for (int64_t h = 0; h < t.extent[2]; ++h, row += t.extent[3]) {
          body(n, i, h, row, t.extent[3]);
        }
      }
    }
  }

  // Every row of the output that is not in its sequence is 0. by_keys: rows are keys.
  void require_zeros(int index, bool by_keys, const char* name) const {
    for_each_row(index, [&](int64_t n, int64_t i, int64_t h, const float* row, int64_t d) {
      if (i < (by_keys ? len_k_ : n == 0 ? len_q_ : 0)) return;
      for (int64_t c = 0; c < d; ++c) {
        require(row[c] == 0, text("%s[%d, %d, %d, %d]=%g: must be 0, beyond the length", name,
                                  static_cast<int>(n), static_cast<int>(i), static_cast<int>(h),
                                  static_cast<int>(c), double{row[c]}));
      }
    });
  }

  // o and lse: is_spoilt(row, head, column) of the first sequence says where o is NaN, and with
  // column -1 where lse is; everything else is finite, and rows beyond the length are empty.
  template <typename IsSpoilt>
  void require_spoilt(const IsSpoilt& is_spoilt) const {
    require_zeros(TESSERA_O, false, "o");
    for_each_row(TESSERA_O, [&](int64_t n, int64_t i, int64_t h, const float* row, int64_t d) {
      for (int64_t c = 0; n == 0 && i < len_q_ && c < d; ++c) {
        require(is_spoilt(i, h, c) ? std::isnan(row[c]) : std::isfinite(row[c]),
                text("o[0, %d, %d, %d]=%g", static_cast<int>(i), static_cast<int>(h),
                     static_cast<int>(c), double{row[c]}));
      }
    });
    const Options& o = attention_.options;
    const std::vector<float> lse = values(TESSERA_LSE);
    for (int64_t at = 0; at < o.b * o.hq * o.sq; ++at) {
      const int64_t i = at % o.sq, h = at / o.sq % o.hq, n = at / o.sq / o.hq;
      const float x = lse[static_cast<size_t>(at)];
      const bool exists = n == 0 && i < len_q_;
      const bool right = !exists               ? x == -INFINITY
                         : is_spoilt(i, h, -1) ? std::isnan(x)
                                               : std::isfinite(x);
      require(right, text("lse[%d, %d, %d]=%g", static_cast<int>(n), static_cast<int>(h),
                          static_cast<int>(i), double{x}));
    }
  }

  // True if row i of the first sequence sees the spoilt key.
  bool sees(int64_t i) const {
    return !(attention_.options.flags & TESSERA_CAUSAL) || i + len_k_ - len_q_ >= kHere;
  }
  bool is_of_group(int64_t head) const {
    return head < attention_.options.hq / attention_.options.hk;
  }
  int64_t last_row() const { return len_q_ - 1; }

 private:
  static int64_t bytes_of(int dtype) { return dtype == TESSERA_FP32 ? 4 : 2; }
  static float load(const char* at, int dtype) {
    if (dtype == TESSERA_FP16) {  // as coarse as the test needs it: zero, finite, infinite, NaN
      uint16_t half;
      std::memcpy(&half, at, 2);
      const bool special = (half & 0x7C00) == 0x7C00;
      if (special) return half & 0x3FF ? NAN : INFINITY;
      return static_cast<float>(half & 0x7FFF);
    }
    uint32_t bits = 0;
    if (dtype == TESSERA_FP32) {
      std::memcpy(&bits, at, 4);
    } else {
      uint16_t high;
      std::memcpy(&high, at, 2);
      bits = uint32_t{high} << 16;
    }
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
  }

  Attention attention_;
  int32_t len_q_, len_k_;
};

std::string forward(const Options& options) {
  for (const int index : {TESSERA_Q, TESSERA_K, TESSERA_V}) {
    Spoilt spoilt(options);
    const int64_t last = spoilt.last_row();
    spoilt.spoil(index, index == TESSERA_Q ? last : kHere, kHere);
    spoilt.run();
    spoilt.require_spoilt([&](int64_t i, int64_t h, int64_t column) {
      if (index == TESSERA_Q) return i == last && h == 0;
      if (!spoilt.is_of_group(h) || !spoilt.sees(i)) return false;
      return index == TESSERA_K || column == kHere;
    });
  }
  return "reaches what sees it; rows beyond the length are 0";
}

// Only what is beyond a length has a promise in gradients.
std::string backward(const Options& options) {
  for (const int index : {TESSERA_Q, TESSERA_K, TESSERA_V, TESSERA_DO}) {
    Spoilt spoilt(options);
    spoilt.spoil(index, kHere, kHere);
    spoilt.run();
    spoilt.require_zeros(TESSERA_DQ, false, "dq");
    spoilt.require_zeros(TESSERA_DK, true, "dk");
    spoilt.require_zeros(TESSERA_DV, true, "dv");
  }
  return "rows beyond the length are 0";
}

}  // namespace

void nan() {
  std::vector<Options> all;
  for (Options options : cases()) {
    if (options.flags & TESSERA_DROPOUT) continue;      // what it removes may come out either way
    for (const int64_t d : {options.d, int64_t{36}}) {  // rows of 36 are for the general kernels
      options.d = d;
      all.push_back(options);
      if (options.pass == TESSERA_BACKWARD) {
        all.push_back(options);
        all.back().flags &= ~static_cast<uint32_t>(TESSERA_DETERMINISTIC);
        all.push_back(all.back());
        all.back().flags |= TESSERA_SOFTCAP;
        continue;
      }
      // Scores that are small beside the cap are computed in another way.
      for (const double cap : {1., 30.}) {
        all.push_back(options);
        all.back().flags |= TESSERA_SOFTCAP;
        all.back().softcap = cap;
      }
    }
  }
  // Few rows, of which one is missing: the kernels for decoding, which split the keys.
  for (const std::string& backend : backends()) {
    for (const int64_t d : {64, 36, 512}) {
      for (const bool capped : {false, true}) {
        Options options;
        options.backend = backend;
        options.d = d;
        options.sq = 4, options.sk = 4096, options.hq = 8, options.hk = 2;
        options.flags = capped ? TESSERA_SOFTCAP : 0;
        all.push_back(options);
      }
    }
  }
  for (const Options& options : all) {
    const char* cap = !(options.flags & TESSERA_SOFTCAP) ? ""
                      : options.softcap > 1              ? " of 30"
                                                         : " of 1";
    check("nan", name_of(options) + cap,
          [&] { return options.pass == TESSERA_FORWARD ? forward(options) : backward(options); });
  }
}

}  // namespace tessera_test
