// SPDX-License-Identifier: Apache-2.0
#include "cpu/cores.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <thread>

#if defined(__linux__)
#include <sched.h>
#endif

namespace tessera::cpu {
namespace {

#if defined(__linux__)

// C's streams, not C++'s: those of two C++ libraries in one process (a Python wheel may bring its
// own) take each other's locales and crash.
using File = std::unique_ptr<std::FILE, int (*)(std::FILE*)>;

File open_to_read(const std::string& path) { return {std::fopen(path.c_str(), "re"), std::fclose}; }

// The first number of a list such as "3,67" or "2-3": the lowest hyperthread of cpu's core.
int first_sibling(int cpu) {
  const File file = open_to_read("/sys/devices/system/cpu/cpu" + std::to_string(cpu) +
                                 "/topology/thread_siblings_list");
  int first = cpu;
  return file && std::fscanf(file.get(), "%d", &first) == 1 ? first : cpu;
}

// 0 when the mask cannot be read.
int cores_in_affinity_mask() {
  constexpr int kSets = 8;  // 8192 CPUs: more than the kernel supports
  cpu_set_t sets[kSets];
  if (sched_getaffinity(0, sizeof sets, sets) != 0) return 0;
  constexpr int kCpus = kSets * CPU_SETSIZE;
  const auto allowed = [&](int cpu) { return CPU_ISSET_S(cpu, sizeof sets, sets); };
  int cores = 0;
  for (int cpu = 0; cpu < kCpus; ++cpu) {
    if (!allowed(cpu)) continue;
    const int first = first_sibling(cpu);
    cores += first >= cpu || first < 0 || !allowed(first);
  }
  return cores;
}

// The number that a file begins with; -1 without one ("max", or no file).
double number_in(const std::string& path) {
  const File file = open_to_read(path);
  double number = -1;
  return file && std::fscanf(file.get(), "%lf", &number) == 1 ? number : -1;
}

// Cores that a group's folder grants: cpu.max "200000 100000" in version 2, two files in version 1.
double quota_of_folder(const std::string& folder) {
  double quota = -1, period = 0;
  const File file = open_to_read(folder + "/cpu.max");
  if (!file || std::fscanf(file.get(), "%lf %lf", &quota, &period) != 2) {
    quota = number_in(folder + "/cpu.cfs_quota_us");
    period = number_in(folder + "/cpu.cfs_period_us");
  }
  return quota > 0 && period > 0 ? quota / period : std::numeric_limits<double>::infinity();
}

// The tightest quota of the process's group and the groups around it. Lines of /proc/self/cgroup
// are "id:controllers:path"; version 2 has no controllers.
double control_group_quota() {
  double quota = std::numeric_limits<double>::infinity();
  const File groups = open_to_read("/proc/self/cgroup");
  char text[4096];  // longer than any path
  while (groups && std::fgets(text, sizeof text, groups.get())) {
    const std::string line(text, std::strcspn(text, "\n"));
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    std::string path = line.substr(second + 1);
    std::string root;
    if (controllers == ",,")
      root = "/sys/fs/cgroup";
    else if (controllers.find(",cpu,") != std::string::npos)
      root = "/sys/fs/cgroup/cpu";
    else
      continue;
    for (;;) {
      quota = std::min(quota, quota_of_folder(root + path));
      const size_t slash = path.rfind('/');
      if (path.size() <= 1 || slash == std::string::npos) break;
      path.resize(slash == 0 ? 1 : slash);
    }
  }
  return quota;
}

#endif

}  // namespace

int usable_cores() {
  int cores = 0;
#if defined(__linux__)
  cores = cores_in_affinity_mask();
  const double quota = control_group_quota();
  if (cores > 0 && quota < cores) cores = static_cast<int>(std::ceil(quota));
#endif
  if (cores <= 0) cores = static_cast<int>(std::thread::hardware_concurrency());
  return std::max(cores, 1);
}

}  // namespace tessera::cpu
