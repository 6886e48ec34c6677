// SPDX-License-Identifier: Apache-2.0
// replay FILES: the inputs of a corpus, one a line (corpus.py), once each, in any build. Eight
// threads take them by turns, so that the thread sanitizer sees calls of every kind at once.
#include <atomic>
#include <cctype>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

// Bytes of a line: \n, \\, \xNN, and others as they are.
std::string bytes_of(const std::string& line) {
  std::string bytes;
  for (size_t i = 0; i < line.size(); ++i) {
    if (line[i] != '\\' || i + 1 == line.size()) {
      bytes += line[i];
      continue;
    }
    const char kind = line[++i];
    if (kind == 'x') {
      bytes += static_cast<char>(std::stoi(line.substr(i + 1, 2), nullptr, 16));
      i += 2;
    } else {
      bytes += kind == 'n' ? '\n' : kind;
    }
  }
  return bytes;
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string> inputs;
  for (int i = 1; i < argc; ++i) {
    std::ifstream file(argv[i]);
    for (std::string line; std::getline(file, line);) inputs.push_back(bytes_of(line));
  }
  std::atomic<size_t> next{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] {
      for (size_t at = next++; at < inputs.size(); at = next++) {
        const std::string& bytes = inputs[at];
        LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::printf("%zu inputs passed\n", inputs.size());
  return inputs.empty() ? 1 : 0;
}
