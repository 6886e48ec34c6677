// SPDX-License-Identifier: Apache-2.0
// How many cores this process may keep busy.
#pragma once

namespace tessera::cpu {

// The cores, at least 1, in the affinity mask (hyperthreads of one core count once), no more than
// the CPU quota of the process's control group. Reads /proc and /sys; call once.
int usable_cores();

}  // namespace tessera::cpu
