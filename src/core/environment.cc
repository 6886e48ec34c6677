// SPDX-License-Identifier: Apache-2.0
#include "core/environment.h"

#include <cstdlib>

namespace tessera {
namespace {

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

int positive_number(const std::string& text) {
  char* end = nullptr;
  const long value = std::strtol(text.c_str(), &end, 10);
  return !text.empty() && *end == '\0' && value > 0 && value <= 1 << 16 ? static_cast<int>(value)
                                                                        : 0;
}

}  // namespace

const Environment& environment() {
  static const Environment read{.backend = variable("TESSERA_BACKEND"),
                                .log = variable("TESSERA_LOG"),
                                .cpu_isa = variable("TESSERA_CPU_ISA"),
                                .num_threads = positive_number(variable("TESSERA_NUM_THREADS")),
                                .num_threads_text = variable("TESSERA_NUM_THREADS")};
  return read;
}

}  // namespace tessera
