// SPDX-License-Identifier: Apache-2.0
// The bytes of an input, read as what a target asks for; after their end every answer is 0.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>

namespace fuzz {

class Bytes {
 public:
  Bytes(const uint8_t* data, size_t size) : at_(data), end_(data + size) {}

  bool done() const { return at_ == end_; }
  uint8_t byte() { return done() ? 0 : *at_++; }
  int below(int n) { return byte() % n; }
  bool coin() { return byte() % 2 != 0; }

  // Mostly small, often at an edge, else any.
  int64_t integer() {
    static constexpr int64_t kEdges[] = {-1,        INT32_MAX,
                                         INT32_MIN, INT64_MAX,
                                         INT64_MIN, int64_t{1} << 16,
                                         1LL << 24, 1LL << 31,
                                         1LL << 32, (1LL << 32) + 5,
                                         1LL << 40, 1LL << 50,
                                         1LL << 60, 1LL << 61,
                                         1LL << 62, INT64_MAX - 1,
                                         400000000, 64051194700380384,
                                         -5,        -(1LL << 40),
                                         255,       256,
                                         1000,      65535};
    constexpr int kNumEdges = static_cast<int>(sizeof kEdges / sizeof *kEdges);
    const uint8_t first = byte();
    if (first < 160) return first;
    if (first < 240) return kEdges[first % kNumEdges];
    uint64_t any = 0;
    for (int i = 0; i < 8; ++i) any = any << 8 | byte();
    return static_cast<int64_t>(any);
  }

  double real() {
    switch (below(8)) {
      case 0:
        return 0;
      case 1:
        return 0.5;
      case 2:
        return __builtin_inf();
      case 3:
        return __builtin_nan("");
      case 4:
        return -1;
      case 5:
        return 1e300;
      default:
        break;
    }
    const int64_t bits = integer();
    double value = 0;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }

  // What stands before the next newline, which is passed.
  std::string line() {
    std::string text;
    while (!done()) {
      const char c = static_cast<char>(byte());
      if (c == '\n') break;
      text += c;
    }
    return text;
  }

 private:
  const uint8_t *at_, *end_;
};

// What must hold, beside the sanitizers.
#define FUZZ_CHECK(condition)                                                                \
  do {                                                                                       \
    if (!(condition)) {                                                                      \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition), __builtin_trap(); \
    }                                                                                        \
  } while (false)

}  // namespace fuzz
