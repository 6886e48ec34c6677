/* SPDX-License-Identifier: Apache-2.0
 *
 * The conformance suite as C functions, for the test runners of every language. Exported by
 * libtessera_check; the header is not installed, no promise of stability.
 *
 * A case owns its tensors. It is not thread-safe; different cases are independent.
 *
 * Devices: tessera_case_run with a CUDA device copies every buffer to device memory, each between
 * guard bands, and copies the outputs back. It does so through tessera::DeviceMemory
 * (src/core/memory.h): a folder with devices defines tessera::cuda_memory(), found at link time.
 */
#ifndef TESSERA_CONFORMANCE_H_
#define TESSERA_CONFORMANCE_H_

#include "tessera.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct tessera_case tessera_case;

/* Parses the line, validates its problem, fills its tensors. NULL with an error (error->message
 * names the token) when the line or the problem is illegal. Free it with tessera_case_free. */
TESSERA_API tessera_case* tessera_case_new(const char* text, tessera_error* error);
TESSERA_API void tessera_case_free(tessera_case* c);

/* What a line describes, without a tensor: its problem, and the scalars of its buffers. */
TESSERA_API int32_t tessera_case_describe(const char* text, tessera_problem* problem,
                                          tessera_buffers* buffers, tessera_error* error);

/* The problem and its buffers on the host; they live as long as the case. Callers may write results
 * into the output tensors, anywhere inside their extents. */
TESSERA_API const tessera_problem* tessera_case_problem(const tessera_case* c);
TESSERA_API tessera_buffers* tessera_case_buffers(tessera_case* c);

/* How to ask tessera.attention for this case, as JSON. Numbers are indices of problem.tensor[]:
 *
 *   {"case":     canonical line,
 *    "pass":     "fwd" | "bwd",
 *    "dtype":    "bf16",
 *    "kwargs":   {"layout": "bshd" | ["sbhd", "thd"], "causal": true, "return_lse": true, ...},
 *                scalar keywords
 *    "tensors":  {"q": 0, "keep": 4, "seqlens_q": 10, "segment_ids": [6, 7], ...},
 *                keyword -> index, or a pair for (q, k) or (k, v)
 *    "same":     [["seqlens_q", "seqlens_k"]],
 *                keywords that must be given the very same array
 *    "backward": {"do": 24, "o": 21, "lse": 22, "dlse": 25},
 *                bwd only
 *    "outputs":  {"o": 21, "lse": 22, "max_logit": 23} | {"dq": 26, ...},
 *    "grads":    ["dq", "dk", "dv", ...],
 *                bwd only
 *    "out":      true,
 *                results are to land in the case's own arrays (out=, grads={...})
 *    "axes":     {"0": [1, 0, 2, 3], ...}}
 *                index -> which axes of the tensor, in the caller's order
 *
 * Writes at most capacity bytes with a final NUL; returns the bytes that the whole needs, NUL
 * included. */
TESSERA_API int64_t tessera_case_json(const tessera_case* c, char* buffer, int64_t capacity);

/* Fills every output with the pattern that compare() takes for "not written". */
TESSERA_API void tessera_case_poison_outputs(tessera_case* c);

/* Poisons the outputs, then tessera_prepare and tessera_run. backend "" or NULL: the library
 * chooses. Returns error->code. */
TESSERA_API int32_t tessera_case_run(tessera_case* c, const char* backend,
                                     const tessera_device* device, int32_t num_threads,
                                     tessera_error* error);

/* Judges what the outputs hold by the error rule. JSON; a number that is not finite is null:
 *
 *   {"passed":   bool,
 *    "refused":  bool,
 *    "outputs":  {"o": {"max_err", "max_limit", "mean_err", "mean_limit", "ok"}, ...},
 *    "failures": ["o: max error ..."]}
 *
 * The rules for the buffer are those of tessera_case_json. */
TESSERA_API int64_t tessera_case_compare(tessera_case* c, char* buffer, int64_t capacity);

#ifdef __cplusplus
}
#endif

#endif /* TESSERA_CONFORMANCE_H_ */
