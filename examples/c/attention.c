/* SPDX-License-Identifier: Apache-2.0
 * example (tessera): causal attention from C
 * After `cmake --install`:
 *   cc attention.c $(pkg-config --cflags --libs tessera) -o attention && ./attention
 */
#include <stdio.h>
#include <stdlib.h>
#include <tessera.h>

enum { BATCH = 2, SEQLEN = 128, HEADS = 4, HEAD_DIM = 64 };

/* A contiguous [batch, seqlen, heads, head_dim] tensor of floats. */
static tessera_tensor bshd(void) {
  tessera_tensor t = {TESSERA_FP32,
                      0,
                      {BATCH, SEQLEN, HEADS, HEAD_DIM},
                      {SEQLEN * HEADS * HEAD_DIM, HEADS * HEAD_DIM, HEAD_DIM, 1}};
  return t;
}

static float* random_tensor(void) {
  const int count = BATCH * SEQLEN * HEADS * HEAD_DIM;
  float* data = malloc(count * sizeof *data);
  for (int i = 0; data && i < count; ++i) data[i] = 2.0f * (float)rand() / (float)RAND_MAX - 1.0f;
  return data;
}

int main(void) {
  /* What is computed: shapes and flags. */
  tessera_problem problem = {.struct_size = sizeof problem, .flags = TESSERA_CAUSAL};
  problem.tensor[TESSERA_Q] = bshd();
  problem.tensor[TESSERA_K] = bshd();
  problem.tensor[TESSERA_V] = bshd();
  problem.tensor[TESSERA_O] = bshd();

  /* Where, and what that takes. */
  tessera_device device = {.kind = TESSERA_CPU};
  tessera_info info = {.struct_size = sizeof info};
  tessera_error error = {.struct_size = sizeof error};
  if (tessera_prepare(&problem, &device, 0, &info, &error)) {
    fprintf(stderr, "%s\n", error.message);
    return 1;
  }

  /* With what: one pointer for each tensor of the problem. */
  float *q = random_tensor(), *k = random_tensor(), *v = random_tensor(), *o = random_tensor();
  size_t workspace_bytes = ((size_t)info.workspace_bytes + 63) / 64 * 64 + 64;
  void* workspace = aligned_alloc(64, workspace_bytes);
  if (!q || !k || !v || !o || !workspace) return 1;
  tessera_buffers buffers = {.struct_size = sizeof buffers};
  buffers.data[TESSERA_Q] = q;
  buffers.data[TESSERA_K] = k;
  buffers.data[TESSERA_V] = v;
  buffers.data[TESSERA_O] = o;
  buffers.workspace = workspace;
  buffers.workspace_bytes = info.workspace_bytes;
  if (tessera_run(&problem, &device, &buffers, &error)) {
    fprintf(stderr, "%s\n", error.message);
    return 1;
  }

  /* The first query sees the first key alone: its output is the first value. */
  printf("tessera %s, backend %s, %lld bytes of workspace\n", tessera_version(), info.backend,
         (long long)info.workspace_bytes);
  printf("o[0] = %f, v[0] = %f\n", o[0], v[0]);
  int right = o[0] - v[0] < 1e-6f && v[0] - o[0] < 1e-6f;
  free(q), free(k), free(v), free(o), free(workspace);
  return right ? 0 : 1;
}
