// SPDX-License-Identifier: Apache-2.0
#include "conformance/probe.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "core/machine/amx.h"

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

// A burst of multiply-adds with enough independent sums to fill the pipeline; answers its FLOPs.
// The sum goes to *sink so that it is computed, and TESSERA_OPAQUE keeps the compiler from seeing
// that the sums are equal.
using Burst = double (*)(float* sink);

constexpr int kRounds = 20000;
constexpr int kSums = 16;  // latency 4..6, two a cycle

double portable_fp32(float* sink) {
  constexpr int kLanes = 8;
  float sums[kSums * kLanes];
  for (int i = 0; i < kSums * kLanes; ++i) sums[i] = *sink + static_cast<float>(i);
  float a = *sink + 1.0f, b = *sink + 0.5f;
  for (int round = 0; round < kRounds; ++round) {
    for (float& sum : sums) sum = sum * a + b;
  }
  for (const float sum : sums) *sink += sum * 0;
  return 2.0 * kRounds * kSums * kLanes;
}

#if defined(__x86_64__)
#define TESSERA_OPAQUE(x) asm volatile("" : "+v"(x))

__attribute__((target("avx2,fma"))) double avx2_fp32(float* sink) {
  constexpr int kRegisters = 12;  // of 16, beside the two factors
  __m256 sums[kRegisters] = {};
  for (__m256& sum : sums) TESSERA_OPAQUE(sum);
  const __m256 a = _mm256_set1_ps(*sink + 1.0f), b = _mm256_set1_ps(*sink + 0.5f);
  for (int round = 0; round < kRounds; ++round) {
#pragma GCC unroll 12
    for (int i = 0; i < kRegisters; ++i) sums[i] = _mm256_fmadd_ps(a, b, sums[i]);
  }
  __m256 total = sums[0];
  for (int i = 1; i < kRegisters; ++i) total = _mm256_add_ps(total, sums[i]);
  *sink += _mm256_cvtss_f32(total) * 0;
  return 2.0 * kRounds * kRegisters * 8;
}

__attribute__((target("avx512f"))) double avx512_fp32(float* sink) {
  __m512 sums[kSums] = {};
  for (__m512& sum : sums) TESSERA_OPAQUE(sum);
  const __m512 a = _mm512_set1_ps(*sink + 1.0f), b = _mm512_set1_ps(*sink + 0.5f);
  for (int round = 0; round < kRounds; ++round) {
#pragma GCC unroll 16
    for (int i = 0; i < kSums; ++i) sums[i] = _mm512_fmadd_ps(a, b, sums[i]);
  }
  __m512 total = sums[0];
  for (int i = 1; i < kSums; ++i) total = _mm512_add_ps(total, sums[i]);
  *sink += _mm512_cvtss_f32(total) * 0;
  return 2.0 * kRounds * kSums * 16;
}

__attribute__((target("avx512f,avx512bf16"))) double avx512_bf16(float* sink) {
  __m512 sums[kSums] = {};
  for (__m512& sum : sums) TESSERA_OPAQUE(sum);
  const __m512bh a = (__m512bh)_mm512_set1_epi16(0x3F80);  // 1.0
  for (int round = 0; round < kRounds; ++round) {
#pragma GCC unroll 16
    for (int i = 0; i < kSums; ++i) sums[i] = _mm512_dpbf16_ps(sums[i], a, a);
  }
  __m512 total = sums[0];
  for (int i = 1; i < kSums; ++i) total = _mm512_add_ps(total, sums[i]);
  *sink += _mm512_cvtss_f32(total) * 0;
  return 4.0 * kRounds * kSums * 16;
}

// Products of 16 x 32 by 32 x 16 on four tiles of sums by turns, which is as fast as they come.
double amx_bf16(float*) {
  const WholeTiles configuration;
  asm volatile("ldtilecfg %0" : : "m"(configuration));
  for (int round = 0; round < kRounds; ++round) {
    asm volatile(
        "tdpbf16ps %tmm5, %tmm4, %tmm0\n tdpbf16ps %tmm5, %tmm4, %tmm1\n"
        "tdpbf16ps %tmm5, %tmm4, %tmm2\n tdpbf16ps %tmm5, %tmm4, %tmm3");
  }
  asm volatile("tilerelease");
  return 2.0 * kRounds * 4 * 16 * 16 * 32;
}
#endif

Burst burst_for(int32_t dtype) {
#if defined(__x86_64__)
  if (dtype == TESSERA_BF16 && may_use_amx()) return amx_bf16;
  if (dtype == TESSERA_BF16 && __builtin_cpu_supports("avx512bf16")) return avx512_bf16;
  if (__builtin_cpu_supports("avx512f")) return avx512_fp32;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return avx2_fp32;
#endif
  (void)dtype;
  return portable_fp32;
}

int threads_or_all(int32_t num_threads) {
  if (num_threads > 0) return num_threads;
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
  return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

// Work per second of body(thread), called again and again on every thread for about `seconds`.
double rate(int threads, double seconds, const std::function<double(int)>& body) {
  std::atomic<int> waiting{threads};
  std::vector<double> rates(static_cast<size_t>(threads));
  const auto work = [&](int thread) {
    body(thread);  // warm up
    for (--waiting; waiting > 0;) std::this_thread::yield();
    const auto start = Clock::now();
    double done = 0, elapsed = 0;
    do {
      done += body(thread);
      elapsed = std::chrono::duration<double>(Clock::now() - start).count();
    } while (elapsed < seconds);
    rates[static_cast<size_t>(thread)] = done / elapsed;
  };
  std::vector<std::thread> others;
  for (int thread = 1; thread < threads; ++thread) others.emplace_back(work, thread);
  work(0);
  for (std::thread& other : others) other.join();
  double total = 0;
  for (const double one : rates) total += one;
  return total;
}

double sum_of(const double* numbers, int64_t count) {
  double sums[8] = {};
  for (int64_t i = 0; i + 8 <= count; i += 8) {
    for (int j = 0; j < 8; ++j) sums[j] += numbers[i + j];
  }
  double total = 0;
  for (const double sum : sums) total += sum;
  return total;
}

}  // namespace
}  // namespace tessera

using namespace tessera;

double tessera_probe_flops(int32_t dtype, int32_t num_threads, double seconds) {
  const Burst burst = burst_for(dtype);
  const int threads = threads_or_all(num_threads);
  std::vector<float> sinks(static_cast<size_t>(threads) * 16);  // a cache line each
  return rate(threads, seconds, [&](int thread) { return burst(&sinks[size_t{16} * thread]); });
}

double tessera_probe_bandwidth(int64_t bytes, int32_t num_threads, double seconds) {
  const int threads = threads_or_all(num_threads);
  const int64_t each = std::max<int64_t>(bytes / threads / 8, 8);
  std::vector<double> numbers(static_cast<size_t>(each * threads), 1.0);
  std::vector<double> sinks(static_cast<size_t>(threads) * 8);
  return rate(threads, seconds, [&](int thread) {
    sinks[size_t{8} * thread] += sum_of(&numbers[static_cast<size_t>(each) * thread], each);
    return 8.0 * static_cast<double>(each);
  });
}
