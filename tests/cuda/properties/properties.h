// SPDX-License-Identifier: Apache-2.0
// The properties of tessera_cuda_properties; properties.cc says what each is.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "attention.h"

namespace tessera_test {

void repeat();
void layouts();
void packed();
void outside();
void nan();
void graph();
void streams();
void dropout();
void errors();
void lengths();
void host_cost();
void addresses();
void biases();
void large();

// The messages of the topics of TESSERA_LOG while it lives.
struct Log {
  std::vector<std::string> messages;
  Log() {
    tessera_set_log(
        [](void* user, const char* topic, const char* message) {
          static_cast<Log*>(user)->messages.push_back(std::string(topic) + ": " + message);
        },
        this);
  }
  ~Log() { tessera_set_log(nullptr, nullptr); }
};

// Runs body and prints one line: what it answers, or why it failed. A case that the forced backend
// refuses is counted and not printed.
void check(const char* property, const std::string& what, const std::function<std::string()>& body);

std::vector<std::string> backends();  // of this device, by name
std::vector<Options> cases();         // forward and deterministic backward of each backend

void require_equal(const std::vector<uint8_t>& expected, const std::vector<uint8_t>& found,
                   const std::string& what);

}  // namespace tessera_test
