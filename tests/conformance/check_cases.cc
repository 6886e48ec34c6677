// SPDX-License-Identifier: Apache-2.0
// tessera_check_cases FILE... [--backend B] [--cuda ORDINAL] [--threads N] [--jobs N]
//                     [--filter TEXT] [--every N] [--random N [--seed S]] [--refused FILE]
// Runs every case of the files (with --every, each Nth of them), and N random ones, through the C
// door and judges it by the error rule. Prints the lines that fail, each with why, then `N passed,
// M refused, K failed`; exits with 1 on any failure. refused.<device> and refused.<backend> beside
// the file, or FILE in their place, hold rules (docs/cases.md): a case must be refused where one of
// them holds, and nowhere else. Random cases know of themselves whether they are legal and whether
// the cpu backend computes them. --threads 0 draws 1 to 8 threads for each case.
#include <fnmatch.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "conformance/conformance_case.h"
#include "conformance/random_cases.h"

namespace {

using tessera::ConformanceCase;

// A fault (a guard page, most likely) names the cases that were running: several, with --jobs or
// --threads, and one of them is guilty.
constexpr int kMaxJobs = 256;
std::atomic<const char*> running[kMaxJobs];

void on_fault(int signal) {
  const auto say = [](const char* text) { (void)!write(STDERR_FILENO, text, strlen(text)); };
  say(signal == SIGSEGV || signal == SIGBUS ? "bad memory access, running:\n" : "died, running:\n");
  for (const auto& line : running) {
    if (const char* const text = line.load()) say(text), say("\n");
  }
  _exit(3);
}

struct Options {
  std::vector<std::string> files;
  std::string backend, filter, refused;
  tessera_device device{};
  size_t every = 1;
  uint64_t random = 0;
  uint32_t seed = 1;
  int threads = 1;                                                   // of one case
  int jobs = static_cast<int>(std::thread::hardware_concurrency());  // cases at once
};

int usage() {
  std::fprintf(stderr,
               "usage: tessera_check_cases FILE... [--backend NAME] [--cuda ORDINAL] [--threads N] "
               "[--jobs N]\n"
               "                           [--filter TEXT] [--every N] [--random N [--seed S]]\n"
               "                           [--refused FILE]\n");
  return 2;
}

std::vector<std::string> words_of(const std::string& line) {
  std::istringstream words(line);
  return {std::istream_iterator<std::string>(words), {}};
}

// True if each word of a rule, a glob, matches a word of the case; one behind `!` must match none.
bool holds(const std::string& rule, const std::vector<std::string>& words) {
  return std::ranges::all_of(words_of(rule), [&](const std::string& glob) {
    const bool negated = glob[0] == '!';
    return negated != std::ranges::any_of(words, [&](const std::string& word) {
             return fnmatch(glob.c_str() + negated, word.c_str(), 0) == 0;
           });
  });
}

std::vector<std::string> lines_of(const std::string& path, bool required) {
  std::ifstream file(path);
  if (!file && required) {
    std::fprintf(stderr, "tessera_check_cases: cannot read %s\n", path.c_str());
    std::exit(2);
  }
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) {
    line = line.substr(0, line.find('#'));
    if (line.find_first_not_of(" \t\r") != std::string::npos) lines.push_back(line);
  }
  return lines;
}

struct Counts {
  std::atomic<int> passed{0}, refused{0}, failed{0}, illegal{0};
};

class Checker {
 public:
  explicit Checker(const Options& options) : options_(options) {}

  void add_file(const std::string& path) {
    size_t number = 0;
    for (const std::string& line : lines_of(path, true)) {
      if (line.find(options_.filter) == std::string::npos) continue;
      if (number++ % options_.every == 0) cases_.push_back(line);
    }
    if (!options_.refused.empty()) return add_rules(options_.refused, true);
    const std::string folder = path.substr(0, path.find_last_of('/') + 1) + "refused.";
    const std::string device = options_.device.kind == TESSERA_CUDA ? "cuda" : "cpu";
    const std::string name = options_.backend.empty() ? device : options_.backend;
    // What no backend of a device runs, then what the one that is forced does not: "cuda_sm90".
    const std::string shared = name.substr(0, name.find('_'));
    add_rules(folder + shared, false);
    if (name != shared) add_rules(folder + name, false);
  }

  int run() {
    std::atomic<size_t> next{0};
    const auto work = [&](int job) {
      for (size_t at; (at = next.fetch_add(1)) < cases_.size() + options_.random;) {
        if (at < cases_.size()) {
          running[job] = cases_[at].c_str();
          check(cases_[at]);
        } else {
          const auto random = tessera::random_case(options_.seed, at - cases_.size());
          running[job] = random.text.c_str();
          check_random(random);
          running[job] = nullptr;  // its text ends here
        }
        running[job] = nullptr;
      }
    };
    std::vector<std::thread> helpers;
    for (int job = 1; job < options_.jobs; ++job) helpers.emplace_back(work, job);
    work(0);
    for (std::thread& helper : helpers) helper.join();
    std::printf("%d passed, %d refused, %d failed\n", counts_.passed.load(), counts_.refused.load(),
                counts_.failed.load());
    if (options_.random > 0)
      std::printf("%d of the random cases were illegal, and said to be\n", counts_.illegal.load());
    return counts_.failed > 0 ? 1 : 0;
  }

 private:
  void add_rules(const std::string& path, bool required) {
    for (std::string& line : lines_of(path, required)) refusals_.push_back(std::move(line));
  }

  void check(const std::string& line) {
    auto made = ConformanceCase::create(line);
    if (!made.ok()) return fail(line, {made.status().message()});  // illegal
    ConformanceCase& c = *made.value();
    const std::vector<std::string> words = words_of(tessera::to_text(c.spec()));
    const auto rule = std::ranges::find_if(
        refusals_, [&](const std::string& refusal) { return holds(refusal, words); });
    const tessera::Status status = c.run(options_.backend, options_.device, threads_of(c));
    if (status.code() == TESSERA_REFUSED) {
      if (rule == refusals_.end())
        return fail(line, {"refused, and no rule says so: " + status.message()});
      ++counts_.refused;
      return;
    }
    if (rule != refusals_.end()) return fail(line, {"runs, and must be refused by: " + *rule});
    const tessera::CaseReport report = c.compare();
    if (!report.passed()) return fail(line, report.failures);
    ++counts_.passed;
  }

  void check_random(const tessera::RandomCase& random) {
    auto made = ConformanceCase::create(random.text);
    tessera::Status status = made.status();
    if (made.ok()) {
      ConformanceCase& c = *made.value();
      status = c.run(options_.backend, options_.device, threads_of(c));
    }
    const std::string& why = status.message();
    if (!random.legal) {
      // One line that names what is wrong, the rule, and what would work.
      const bool clear = why.find(": ") != why.npos && why.find('\n') == why.npos;
      if (status.code() != TESSERA_INVALID || !clear)
        return fail(random.text, {"illegal; must say so in a line: " + why});
      return void(++counts_.illegal);
    }
    if (random.refused != (status.code() == TESSERA_REFUSED))
      return fail(random.text, {random.refused ? "must be refused" : why});
    if (random.refused) return void(++counts_.refused);
    if (!status.ok()) return fail(random.text, {why});
    const tessera::CaseReport report = made.value()->compare();
    if (!report.passed()) return fail(random.text, report.failures);
    ++counts_.passed;
  }

  int threads_of(const ConformanceCase& c) const {
    return options_.threads > 0 ? options_.threads : 1 + static_cast<int>(c.spec().seed % 8);
  }

  void fail(const std::string& line, const std::vector<std::string>& why) {
    ++counts_.failed;
    const std::lock_guard lock(print_);
    std::cout << line << '\n';
    for (const std::string& text : why) std::cout << "    " << text << '\n';
    std::cout.flush();
  }

  const Options& options_;
  std::vector<std::string> cases_;
  std::vector<std::string> refusals_;
  std::mutex print_;
  Counts counts_;
};

}  // namespace

int main(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const bool has_value = i + 1 < argc;
    if (!word.starts_with("--"))
      options.files.push_back(word);
    else if (!has_value)
      return usage();
    else if (word == "--backend")
      options.backend = argv[++i];
    else if (word == "--filter")
      options.filter = argv[++i];
    else if (word == "--refused")
      options.refused = argv[++i];
    else if (word == "--threads")
      options.threads = std::atoi(argv[++i]);
    else if (word == "--jobs")
      options.jobs = std::atoi(argv[++i]);
    else if (word == "--every")
      options.every = std::strtoull(argv[++i], nullptr, 10);
    else if (word == "--random")
      options.random = std::strtoull(argv[++i], nullptr, 10);
    else if (word == "--seed")
      options.seed = static_cast<uint32_t>(std::strtoul(argv[++i], nullptr, 10));
    else if (word == "--cuda")
      options.device = {TESSERA_CUDA, std::atoi(argv[++i]), 0, 0};
    else
      return usage();
  }
  if (options.files.empty() && options.random == 0) return usage();
  if (options.jobs < 1 || options.jobs > kMaxJobs || options.every < 1) return usage();
  for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) signal(fault, on_fault);
  Checker checker(options);
  for (const std::string& file : options.files) checker.add_file(file);
  return checker.run();
}
