/* SPDX-License-Identifier: Apache-2.0
 *
 * What the machine can do at best, for bench to measure against. Exported by
 * libtessera_check; not installed, no promise of stability. Thread-safe; starts threads of its own.
 */
#ifndef TESSERA_PROBE_H_
#define TESSERA_PROBE_H_

#include "tessera.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Floating-point operations per second of the widest multiply-add loop for inputs of this dtype on
 * num_threads threads (0: all that the process may use), measured for about `seconds`. bf16 uses
 * the bf16 dot product where the CPU has one; fp16 and fp8 are computed in fp32, as kernels do. */
TESSERA_API double tessera_probe_flops(int32_t dtype, int32_t num_threads, double seconds);

/* Bytes per second read from memory that no cache holds: `bytes` are split over the threads. */
TESSERA_API double tessera_probe_bandwidth(int64_t bytes, int32_t num_threads, double seconds);

#ifdef __cplusplus
}
#endif

#endif /* TESSERA_PROBE_H_ */
