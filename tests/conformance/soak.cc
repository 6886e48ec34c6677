// SPDX-License-Identifier: Apache-2.0
// tessera_soak [--minutes M] [--jobs N] [--seed S] [--growth MIB]
// Problems of mixed shapes from N threads at once, for M minutes. Small ones, of the whole case
// language, are judged against the reference; larger ones, of the shapes that people run, are
// computed with one and with two threads, whose results must be the same bits. Prints a line a
// minute: problems, resident memory, mappings, threads and open files. Fails if a result is wrong
// or if the least resident memory of the second half exceeds that of the second quarter by more
// than --growth.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "conformance/conformance_case.h"
#include "conformance/random_cases.h"
#include "core/mask/philox.h"

namespace {

using Clock = std::chrono::steady_clock;
using tessera::ConformanceCase;

struct Options {
  double minutes = 60;
  int jobs = 2;
  uint32_t seed = 1;
  double growth = 16;  // MiB
};

// ---- what the process holds ----

int64_t of_status(const std::string& key) {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with(key + ":")) return std::atoll(line.c_str() + key.size() + 1);
  }
  return 0;
}

double resident_mib() { return static_cast<double>(of_status("VmRSS")) / 1024; }

int64_t mappings() {
  std::ifstream file("/proc/self/maps");
  int64_t count = 0;
  for (std::string line; std::getline(file, line);) ++count;
  return count;
}

int64_t open_files() {
  const std::filesystem::directory_iterator files("/proc/self/fd");
  return std::distance(begin(files), end(files));
}

// ---- larger problems ----

// Shapes of training, prefill and decode; lengths are drawn. Backward ones are kept shorter: their
// inputs o and lse come from the reference.
struct LargerCase {
  const char* format;  // of dtype, length and head dim
  int times;           // the length: this times one of 1 .. 1500; kShort: one of 1 .. 200
};
constexpr int kShort = 0;
constexpr LargerCase kLargerCases[] = {
    {"fwd %s b=1 h=4 s=%d d=%d", 1},
    {"fwd %s b=2 hq=8 hk=2 causal s=%d d=%d", 1},
    {"fwd %s b=8 hq=32 hk=4 sq=1 sk=%d d=%d", 4},
    {"fwd %s b=4 hq=8 hk=8 causal align=bottom_right sq=3 sk=%d d=%d", 2},
    {"fwd %s b=4 h=2 layout=thd lens=random:7 s=%d d=%d", 1},
    {"fwd %s b=1 h=4 bias=post softcap=20 s=%d d=%d", 1},
    {"fwd %s b=1 h=4 window=128,0 s=%d d=%d", 1},
    {"fwd %s b=16 hq=8 hk=1 page=16 sq=1 sk=%d d=%d", 1},
    {"fwd %s b=1 h=2 dropout=0.1 segments=4 s=%d d=%d", 1},
    {"bwd %s b=2 hq=4 hk=2 causal s=%d d=%d", kShort},
    {"bwd %s b=1 h=2 bias=post s=%d d=%d", kShort},
    {"bwd %s b=1 h=2 s=%d d=%d", kShort},
};

std::string larger_case(uint32_t seed, uint64_t index) {
  const auto words = tessera::philox4x32_7(seed, 0x50AC, static_cast<uint32_t>(index),
                                           static_cast<uint32_t>(index >> 32), 0, 0);
  const char* const dtype = (const char* const[]){"fp32", "bf16", "fp16"}[words.word[0] % 3];
  const int length = static_cast<int>(words.word[1] % 1500) + 1;
  const int d = (const int[]){64, 96, 128, 192}[words.word[2] % 4];
  const LargerCase& form = kLargerCases[words.word[3] % std::size(kLargerCases)];
  char line[200];
  std::snprintf(line, sizeof line, form.format, dtype,
                form.times == kShort ? length % 200 + 1 : form.times * length, d);
  return line;
}

// The bytes of outputs that are dense, as those of larger_case() are.
std::vector<std::string> output_bytes(ConformanceCase& c) {
  std::vector<std::string> all;
  const bool backward = c.problem().tensor[TESSERA_DQ].dtype != 0;
  for (int index = backward ? TESSERA_DQ : TESSERA_O; index < TESSERA_NUM_TENSORS; ++index) {
    if (!backward && index > TESSERA_MAX_LOGIT) break;
    const auto& t = c.problem().tensor[index];
    if (t.dtype == 0) continue;
    int64_t elements = 1;
    for (int axis = 0; axis < tessera::tensor_rule(index).rank; ++axis) elements *= t.extent[axis];
    all.emplace_back(static_cast<const char*>(c.buffers().data[index]),
                     static_cast<size_t>(elements * tessera::size_of(t.dtype)));
  }
  return all;
}

// ---- one problem: "" or what is wrong ----

std::string check_small(const tessera::RandomCase& random) {
  auto made = ConformanceCase::create(random.text);
  tessera::Status status = made.status();
  if (made.ok()) status = made.value()->run("", {}, 1 + static_cast<int>(random.text.size() % 2));
  if (!random.legal) return status.code() == TESSERA_INVALID ? "" : "illegal, and accepted";
  if (!status.ok()) {
    return random.refused && status.code() == TESSERA_REFUSED ? "" : status.message();
  }
  const tessera::CaseReport report = made.value()->compare();
  return report.passed() || report.failures.empty() ? "" : report.failures[0];
}

std::string check_larger(const std::string& line) {
  auto made = ConformanceCase::create(line);
  if (!made.ok()) return made.status().message();
  ConformanceCase& c = *made.value();
  std::vector<std::string> first;
  for (int threads : {1, 2}) {
    const tessera::Status status = c.run("cpu", {}, threads);
    if (!status.ok()) return status.message();
    if (threads == 1) {
      first = output_bytes(c);
    } else if (output_bytes(c) != first) {
      return "other bits with two threads than with one";
    }
  }
  return first.empty() ? "no outputs" : "";
}

// ---- the run ----

class Soak {
 public:
  explicit Soak(const Options& options) : options_(options) {}

  int run() {
    std::vector<std::thread> jobs;
    for (int job = 0; job < options_.jobs; ++job) jobs.emplace_back([this] { work(); });
    std::printf("minute  problems  wrong  resident MiB, least  most  mappings  threads  files\n");
    const auto start = Clock::now();
    const auto minutes = [&] {
      return std::chrono::duration<double>(Clock::now() - start).count() / 60;
    };
    // What problems in flight hold comes and goes; what is kept for good raises the least.
    double least_of[2] = {1e9, 1e9};
    for (int minute = 1; minutes() < options_.minutes; ++minute) {
      double least = 1e9, most = 0;
      while (minutes() < std::min<double>(minute, options_.minutes)) {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        const double now = resident_mib();
        least = std::min(least, now), most = std::max(most, now);
        const double part = minutes() / options_.minutes;
        if (part > 0.25) least_of[part > 0.5] = std::min(least_of[part > 0.5], now);
      }
      std::printf("%6d %9lld %6d %20.1f %5.0f %9lld %8lld %6lld\n", minute,
                  static_cast<long long>(done_.load()), wrong_.load(), least, most,
                  static_cast<long long>(mappings()), static_cast<long long>(of_status("Threads")),
                  static_cast<long long>(open_files()));
      std::fflush(stdout);
    }
    stop_ = true;
    for (std::thread& job : jobs) job.join();
    const bool grew = least_of[1] > least_of[0] + options_.growth;
    std::printf(
        "%s: %lld problems, %d wrong; resident at least %.1f MiB in the second quarter, %.1f "
        "then\n",
        wrong_ == 0 && !grew ? "ok" : "FAILED", static_cast<long long>(done_.load()), wrong_.load(),
        least_of[0], least_of[1]);
    return wrong_ == 0 && !grew ? 0 : 1;
  }

 private:
  void work() {
    while (!stop_) {
      const uint64_t at = next_.fetch_add(1);
      const bool small = at % 4 != 0;
      const auto random = small ? tessera::random_case(options_.seed, at) : tessera::RandomCase{};
      const std::string line = small ? random.text : larger_case(options_.seed, at);
      const std::string why = small ? check_small(random) : check_larger(line);
      ++done_;
      if (why.empty()) continue;
      ++wrong_;
      const std::lock_guard lock(print_);
      std::printf("%s\n    %s\n", line.c_str(), why.c_str());
    }
  }

  const Options& options_;
  std::atomic<uint64_t> next_{0}, done_{0};
  std::atomic<int> wrong_{0};
  std::atomic<bool> stop_{false};
  std::mutex print_;
};

}  // namespace

int main(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; i += 2) {
    const std::string word = argv[i];
    const double value = i + 1 < argc ? std::atof(argv[i + 1]) : -1;
    if (word == "--minutes" && value > 0) {
      options.minutes = value;
    } else if (word == "--jobs" && value >= 1 && value <= 256) {
      options.jobs = static_cast<int>(value);
    } else if (word == "--seed" && value >= 0) {
      options.seed = static_cast<uint32_t>(value);
    } else if (word == "--growth" && value >= 0) {
      options.growth = value;
    } else {
      std::fprintf(stderr,
                   "usage: tessera_soak [--minutes M] [--jobs N] [--seed S] [--growth MIB]\n");
      return 2;
    }
  }
  return Soak(options).run();
}
