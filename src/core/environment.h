// SPDX-License-Identifier: Apache-2.0
// The environment variables of the library, read together on first use and never again.
#pragma once

#include <string>

namespace tessera {

struct Environment {
  std::string backend;           // TESSERA_BACKEND: as if every problem forced it
  std::string log;               // TESSERA_LOG: topics, comma separated, or "all"
  std::string cpu_isa;           // TESSERA_CPU_ISA: the highest instruction set to use
  int num_threads = 0;           // TESSERA_NUM_THREADS; 0 = not set, or no number from 1 to 65536
  std::string num_threads_text;  // as it is set
};

const Environment& environment();  // thread-safe

}  // namespace tessera
