// SPDX-License-Identifier: Apache-2.0
// replay FILES: the inputs of a corpus, one a line (corpus.py), once each, in any build.
#include <cctype>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>

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
  int count = 0;
  for (int i = 1; i < argc; ++i) {
    std::ifstream file(argv[i]);
    for (std::string line; std::getline(file, line); ++count) {
      const std::string bytes = bytes_of(line);
      LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
    }
  }
  std::printf("%d inputs passed\n", count);
  return count > 0 ? 0 : 1;
}
