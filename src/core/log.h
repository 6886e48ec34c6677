// SPDX-License-Identifier: Apache-2.0
// The log: TESSERA_LOG=dispatch,plan names the topics; the sink is a callback, by default none.
#pragma once

#include "core/status.h"
#include "tessera.h"

namespace tessera {

enum class Topic { kDispatch, kPlan, kChecks, kMemory };

void set_log(tessera_log_callback callback, void* user);
// TESSERA_INVALID where TESSERA_LOG names what is no topic, of the library or of a front end.
Status check_log();
bool log_enabled(Topic topic);  // one relaxed load when nothing listens
[[gnu::format(printf, 2, 3)]] void log(Topic topic, const char* format, ...);

}  // namespace tessera
