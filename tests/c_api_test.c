/* SPDX-License-Identifier: Apache-2.0
 * The library as a C99 program sees it: struct sizes of other versions, errors, a small attention
 * against a closed form. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tessera.h"

static int failures = 0;

#define CHECK(condition)                                             \
  do {                                                               \
    if (!(condition)) {                                              \
      printf("%s:%d: failed: %s\n", __FILE__, __LINE__, #condition); \
      ++failures;                                                    \
    }                                                                \
  } while (0)

enum { B = 1, S = 3, H = 2, D = 4, COUNT = B * S * H * D };

static const tessera_device kCpu = {TESSERA_CPU, 0, 0, 0};
static const tessera_device kHopper = {TESSERA_CUDA, 0, 90, 0};

static void describe(tessera_tensor* t, int32_t dtype, int64_t e0, int64_t e1, int64_t e2,
                     int64_t e3) {
  memset(t, 0, sizeof *t);
  t->dtype = dtype;
  t->extent[0] = e0, t->extent[1] = e1, t->extent[2] = e2, t->extent[3] = e3;
  t->stride[3] = 1;
  t->stride[2] = e3;
  t->stride[1] = e2 * e3;
  t->stride[0] = e1 * e2 * e3;
}

static tessera_problem forward_problem(void) {
  tessera_problem p;
  int i;
  memset(&p, 0, sizeof p);
  p.struct_size = sizeof p;
  for (i = TESSERA_Q; i <= TESSERA_V; ++i) describe(&p.tensor[i], TESSERA_FP32, B, S, H, D);
  describe(&p.tensor[TESSERA_O], TESSERA_FP32, B, S, H, D);
  describe(&p.tensor[TESSERA_LSE], TESSERA_FP32, B, H, S, 1);
  p.flags = TESSERA_CAUSAL;
  return p;
}

static tessera_error new_error(void) {
  tessera_error e;
  memset(&e, 0, sizeof e);
  e.struct_size = sizeof e;
  e.code = 77;
  return e;
}

/* Aligned as the CPU wants it; NULL for nothing. The block to free is kept in *block. */
static void* workspace_of(int64_t bytes, void** block) {
  *block = malloc((size_t)bytes + 64);
  return bytes ? (void*)(((uintptr_t)*block + 63) / 64 * 64) : NULL;
}

/* A tessera_allocate: what it was asked for, and where the memory is; none if there is no block. */
typedef struct Lender {
  int64_t asked;
  int calls;
  void** block;
} Lender;

static void* lend(void* context, int64_t bytes) {
  Lender* lender = (Lender*)context;
  lender->asked = bytes;
  ++lender->calls;
  return lender->block ? workspace_of(bytes, lender->block) : NULL;
}

static void runs(void) {
  tessera_problem p = forward_problem();
  tessera_error e = new_error();
  tessera_info info;
  tessera_buffers b;
  float q[COUNT], k[COUNT], v[COUNT], o[COUNT], lse[B * H * S];
  void* block;
  Lender lender = {0, 0, &block};
  int i, row;
  for (i = 0; i < COUNT; ++i) {
    q[i] = 0.0f; /* every visible key weighs the same */
    k[i] = (float)i;
    v[i] = (float)(i / (H * D));
    o[i] = -1.0f;
  }
  memset(&info, 0, sizeof info);
  info.struct_size = sizeof info;
  CHECK(tessera_prepare(&p, &kCpu, 0, &info, &e) == TESSERA_OK);
  CHECK(e.code == TESSERA_OK && e.message[0] == '\0');
  CHECK(strcmp(info.backend, "cpu") == 0);
  memset(&b, 0, sizeof b);
  b.struct_size = sizeof b;
  b.data[TESSERA_Q] = q, b.data[TESSERA_K] = k, b.data[TESSERA_V] = v;
  b.data[TESSERA_O] = o, b.data[TESSERA_LSE] = lse;
  b.workspace = workspace_of(info.workspace_bytes, &block);
  b.workspace_bytes = info.workspace_bytes;
  CHECK(tessera_validate(&p, &kCpu, &b, &e) == TESSERA_OK);
  CHECK(tessera_run(&p, &kCpu, &b, &e) == TESSERA_OK);
  if (e.code != TESSERA_OK) printf("%s\n", e.message);
  for (i = 0; i < COUNT; ++i) CHECK(fabs(o[i] - (i / (H * D)) / 2.0) < 1e-6);
  for (row = 0; row < B * H * S; ++row) CHECK(fabs(lse[row] - log(row % S + 1)) < 1e-6);

  if (info.workspace_bytes > 0) { /* too small, and misaligned */
    b.workspace_bytes = info.workspace_bytes - 1;
    CHECK(tessera_run(&p, &kCpu, &b, &e) == TESSERA_INVALID);
    CHECK(strstr(e.message, "tessera.attention: workspace_bytes=") == e.message);
  }
  free(block);

  block = NULL; /* and without tessera_prepare */
  b.workspace = NULL, b.workspace_bytes = 0;
  b.allocate = lend, b.allocate_context = &lender;
  o[0] = -1.0f;
  CHECK(tessera_run(&p, &kCpu, &b, &e) == TESSERA_OK && o[0] == 0.0f);
  CHECK(lender.asked == info.workspace_bytes && lender.calls == (info.workspace_bytes > 0));
  free(block);
  CHECK(info.workspace_bytes > 0);
  lender.block = NULL;
  CHECK(tessera_run(&p, &kCpu, &b, &e) == TESSERA_OUT_OF_MEMORY);
  CHECK(strstr(e.message, "tessera.attention: workspace: allocate answered NULL") == e.message);
}

static void errors(void) {
  tessera_problem p = forward_problem();
  tessera_error e = new_error();
  tessera_buffers b;
  CHECK(tessera_prepare(NULL, &kCpu, 0, NULL, &e) == TESSERA_INVALID && e.code == TESSERA_INVALID);
  CHECK(tessera_prepare(&p, NULL, 0, NULL, &e) == TESSERA_INVALID);
  CHECK(tessera_prepare(&p, &kCpu, -1, NULL, &e) == TESSERA_INVALID);
  CHECK(tessera_run(&p, &kCpu, NULL, &e) == TESSERA_INVALID);
  CHECK(tessera_run(&p, &kCpu, NULL, NULL) == TESSERA_INVALID);
  memset(&b, 0, sizeof b);
  b.struct_size = sizeof b;
  CHECK(tessera_run(&p, &kCpu, &b, &e) == TESSERA_INVALID);
  CHECK(strcmp(e.message,
               "tessera.attention: q.data=NULL: must point to the elements of shape "
               "[1, 3, 2, 4]") == 0);
  p.tensor[TESSERA_K].extent[3] = 5;
  CHECK(tessera_prepare(&p, &kCpu, 0, NULL, &e) == TESSERA_INVALID);
  CHECK(strstr(e.message, "tessera.attention: k.shape=[1, 3, 2, 5]") == e.message);
  p.pass = TESSERA_BACKWARD;
  CHECK(tessera_prepare(&p, &kCpu, 0, NULL, &e) == TESSERA_INVALID);
  CHECK(strstr(e.message, "tessera.attention_backward: ") == e.message);

  p = forward_problem();
  strcpy(p.backend, "no_such_name");
  CHECK(tessera_prepare(&p, &kCpu, 0, NULL, &e) == TESSERA_INVALID);
  CHECK(strstr(e.message, "backend=\"no_such_name\"") != NULL);
}

static void refusals(void) {
  tessera_problem p = forward_problem();
  tessera_error e = new_error();
  int i;
  for (i = 0; i < TESSERA_NUM_TENSORS; ++i) {
    if (p.tensor[i].dtype) p.tensor[i].dtype = TESSERA_FP64;
  }
  CHECK(tessera_prepare(&p, &kCpu, 0, NULL, &e) == TESSERA_REFUSED && e.code == TESSERA_REFUSED);
  CHECK(strstr(e.message, "\n  cpu: ") && strstr(e.message, "\n  reference: "));
  CHECK(strstr(e.message, "\nrepro: python -m tessera explain \"fwd fp64 b=1 s=3 h=2 d=4 causal"));
  strcpy(p.backend, "reference");
  CHECK(tessera_prepare(&p, &kCpu, 0, NULL, &e) == TESSERA_OK);
}

/* tessera_problem as an older header had it, with fewer tensors, and as a newer one may. */
struct older_problem {
  uint32_t struct_size;
  int32_t pass;
  uint32_t flags;
  int32_t align, format_q, format_kv;
  int64_t window_left, window_right, max_seqlen_q, max_seqlen_k;
  char backend[16];
  int64_t reserved[6];
  tessera_tensor tensor[TESSERA_MAX_LOGIT];
};
/* And before positions and blocks of scales: scales had two axes, and what stood behind was
 * ignored. */
struct before_positions {
  tessera_problem known; /* its first TESSERA_Q_START tensors count */
};
struct newer_problem {
  tessera_problem known;
  tessera_tensor unknown[3];
};

static void struct_sizes(void) {
  const tessera_problem p = forward_problem();
  tessera_error e = new_error();
  struct older_problem older;
  struct newer_problem newer;
  struct before_positions two_axes;
  int i;
  struct {
    uint32_t struct_size;
    int32_t code;
    char message[16];
    char canary;
  } small_error;
  struct {
    uint32_t struct_size;
    int32_t reserved;
    int64_t workspace_bytes;
    char canary;
  } small_info;

  memcpy(&older, &p, sizeof older);
  older.struct_size = sizeof older;
  CHECK(tessera_prepare((const tessera_problem*)&older, &kCpu, 0, NULL, &e) == TESSERA_OK);
  two_axes.known = p;
  two_axes.known.struct_size =
      offsetof(tessera_problem, tensor) + TESSERA_Q_START * (uint32_t)sizeof(tessera_tensor);
  for (i = TESSERA_Q; i <= TESSERA_O; ++i) {
    if (two_axes.known.tensor[i].dtype) two_axes.known.tensor[i].dtype = TESSERA_BF16;
  }
  for (i = 0; i < 2; ++i) {
    two_axes.known.tensor[TESSERA_K + i].dtype = TESSERA_E4M3;
    describe(&two_axes.known.tensor[TESSERA_K_SCALE + i], TESSERA_FP32, 1, H, 77, 88);
    two_axes.known.tensor[TESSERA_K_SCALE + i].stride[1] = 1;
  }
  two_axes.known.tensor[TESSERA_Q_START].dtype = 99; /* beyond struct_size */
  CHECK(tessera_prepare(&two_axes.known, &kCpu, 0, NULL, &e) == TESSERA_OK);
  if (e.code != TESSERA_OK) printf("%s\n", e.message);
  memset(&newer, 0, sizeof newer);
  newer.known = p;
  newer.known.struct_size = sizeof newer;
  CHECK(tessera_prepare(&newer.known, &kCpu, 0, NULL, &e) == TESSERA_OK);
  newer.unknown[2].stride[3] = 1;
  CHECK(tessera_prepare(&newer.known, &kCpu, 0, NULL, &e) == TESSERA_INVALID);
  CHECK(strstr(e.message, "problem.struct_size=") != NULL);
  newer.known.struct_size = 0;
  CHECK(tessera_prepare(&newer.known, &kCpu, 0, NULL, &e) == TESSERA_INVALID);

  memset(&small_error, 'x', sizeof small_error);
  small_error.struct_size = offsetof(tessera_error, message) + 16;
  CHECK(tessera_prepare(NULL, &kCpu, 0, NULL, (tessera_error*)&small_error) == TESSERA_INVALID);
  CHECK(small_error.code == TESSERA_INVALID && small_error.canary == 'x');
  CHECK(strcmp(small_error.message, "tessera.attenti") == 0);
  small_error.struct_size = 0; /* says that nothing may be written */
  small_error.code = 77;
  CHECK(tessera_prepare(NULL, &kCpu, 0, NULL, (tessera_error*)&small_error) == TESSERA_INVALID);
  CHECK(small_error.code == 77);

  memset(&small_info, 'x', sizeof small_info);
  small_info.struct_size = offsetof(tessera_info, backend);
  CHECK(tessera_prepare(&p, &kCpu, 1, (tessera_info*)&small_info, &e) == TESSERA_OK);
  CHECK(small_info.workspace_bytes >= 0 && small_info.canary == 'x');
  small_info.struct_size = 0;
  CHECK(tessera_prepare(&p, &kCpu, 1, (tessera_info*)&small_info, &e) == TESSERA_INVALID);
}

/* o and lse described by the library, also in the struct of an older header. */
static void outputs(void) {
  const tessera_problem whole = forward_problem();
  const int32_t wanted[2] = {TESSERA_LSE, TESSERA_O}, beyond = TESSERA_AMAX_O, none = -1;
  tessera_problem p = whole, before;
  tessera_error e = new_error();
  struct older_problem older;
  int i;
  memset(&p.tensor[TESSERA_O], 0, 2 * sizeof p.tensor[0]);
  p.format_q = TESSERA_BHSD;
  before = p;
  CHECK(tessera_outputs(&p, wanted, 2, &e) == TESSERA_OK && e.code == TESSERA_OK);
  CHECK(p.tensor[TESSERA_O].dtype == TESSERA_FP32 && p.tensor[TESSERA_O].extent[1] == S);
  CHECK(p.tensor[TESSERA_O].stride[2] == S * D && p.tensor[TESSERA_O].stride[1] == D);
  CHECK(p.tensor[TESSERA_LSE].extent[1] == H && p.tensor[TESSERA_LSE].stride[1] == S);
  CHECK(tessera_prepare(&p, &kCpu, 0, NULL, &e) == TESSERA_OK);
  memcpy(&before.tensor[TESSERA_O], &p.tensor[TESSERA_O], 2 * sizeof p.tensor[0]);
  CHECK(memcmp(&before, &p, sizeof p) == 0); /* nothing else was written */

  memset(&p.tensor[TESSERA_O], 0, 2 * sizeof p.tensor[0]);
  memcpy(&older, &p, sizeof older);
  older.struct_size = sizeof older;
  CHECK(tessera_outputs((tessera_problem*)&older, wanted, 2, &e) == TESSERA_OK);
  CHECK(older.struct_size == sizeof older && older.tensor[TESSERA_LSE].extent[2] == S);

  /* Errors write nothing. */
  before = p;
  CHECK(tessera_outputs(&p, wanted, 1, &e) == TESSERA_INVALID);
  CHECK(strstr(e.message, "tessera.attention: o=None: must be given") == e.message);
  CHECK(tessera_outputs(&p, &none, 1, &e) == TESSERA_INVALID);
  CHECK(strstr(e.message, "tessera.attention: wanted[0]=-1") == e.message);
  CHECK(tessera_outputs(&p, NULL, 1, &e) == TESSERA_INVALID);
  CHECK(tessera_outputs(&p, wanted, -1, &e) == TESSERA_INVALID);
  CHECK(tessera_outputs(NULL, wanted, 2, &e) == TESSERA_INVALID);
  CHECK(tessera_outputs(NULL, NULL, 0, NULL) == TESSERA_INVALID);
  p.tensor[TESSERA_K].extent[3] = 5;
  before = p;
  CHECK(tessera_outputs(&p, wanted, 2, &e) == TESSERA_INVALID);
  CHECK(strstr(e.message, "tessera.attention: k.shape=[1, 3, 2, 5]") == e.message);
  CHECK(memcmp(&before, &p, sizeof p) == 0);
  for (i = TESSERA_Q; i <= TESSERA_V; ++i) older.tensor[i].dtype = TESSERA_E4M3;
  older.tensor[TESSERA_O].dtype = TESSERA_BF16;
  CHECK(tessera_outputs((tessera_problem*)&older, &beyond, 1, &e) == TESSERA_INVALID);
  CHECK(strstr(e.message, "lies beyond problem.struct_size=") != NULL);
  p = whole;
  CHECK(tessera_outputs(&p, NULL, 0, &e) == TESSERA_OK); /* nothing wanted, nothing wrong */
  CHECK(memcmp(&whole, &p, sizeof p) == 0);
}

/* Fields that a backend does not have yet are refused by name. */
static void later_fields(void) {
  tessera_problem p = forward_problem();
  tessera_error e = new_error();
  tessera_buffers b;
  tessera_info info;
  float o[COUNT], in[COUNT] = {0}, lse[B * H * S];
  void* block;
  p.flags |= TESSERA_ACCUMULATE;
  CHECK(tessera_prepare(&p, &kHopper, 0, NULL, &e) == TESSERA_REFUSED);
  CHECK(strstr(e.message, "accumulate=True: the Hopper kernels do not have it") != NULL);
  p.flags &= ~(uint32_t)TESSERA_ACCUMULATE;
  memset(&info, 0, sizeof info);
  info.struct_size = sizeof info;
  CHECK(tessera_prepare(&p, &kCpu, 0, &info, &e) == TESSERA_OK);
  memset(&b, 0, sizeof b);
  b.struct_size = sizeof b;
  b.data[TESSERA_Q] = b.data[TESSERA_K] = b.data[TESSERA_V] = in;
  b.data[TESSERA_O] = o, b.data[TESSERA_LSE] = lse;
  b.workspace = workspace_of(info.workspace_bytes, &block);
  b.workspace_bytes = info.workspace_bytes;
  CHECK(tessera_run(&p, &kCpu, &b, &e) == TESSERA_OK);
  b.sm_margin = 3;
  CHECK(tessera_run(&p, &kCpu, &b, &e) == TESSERA_OK); /* without effect on the CPU */
  b.sm_margin = -1;
  CHECK(tessera_run(&p, &kCpu, &b, &e) == TESSERA_INVALID);
  CHECK(strstr(e.message, "sm_margin=-1") != NULL);
  free(block);
}

static void texts(void) {
  const tessera_problem p = forward_problem();
  const tessera_device hopper = {TESSERA_CUDA, 0, 90, 0};
  tessera_error e = new_error();
  char text[16384], few[8];
  int64_t needed = tessera_explain(&p, NULL, &kCpu, text, sizeof text, &e);
  CHECK(needed == (int64_t)strlen(text) + 1);
  CHECK(strstr(text, "\"backend\": \"cpu\"") != NULL);
  CHECK(tessera_explain(&p, NULL, &kCpu, NULL, 0, &e) == needed);
  memset(few, 'x', sizeof few);
  CHECK(tessera_explain(&p, NULL, &kCpu, few, 5, &e) == needed);
  CHECK(memcmp(few, text, 4) == 0 && few[4] == '\0' && few[5] == 'x');
  CHECK(tessera_explain(NULL, "fwd bf16 b=2 s=64 h=4 d=64 causal", &hopper, text, sizeof text, &e) >
        0);
  CHECK(strstr(text, "\"device\": \"sm90\"") != NULL);
  CHECK(tessera_explain(NULL, "fwd nothing", &kCpu, text, sizeof text, &e) == -1);
  CHECK(e.code == TESSERA_INVALID && strstr(e.message, "tessera.explain: ") == e.message);
  CHECK(tessera_explain(NULL, "fwd fp32 b=1 sq=2 sk=3 h=1 d=8 causal", &kCpu, NULL, 0, &e) == -1);
  CHECK(strstr(e.message, "align=None") != NULL);
  CHECK(tessera_explain(NULL, NULL, &kCpu, text, sizeof text, &e) == -1);
  CHECK(tessera_explain(&p, "fwd fp32 b=1 s=2 h=1 d=8", &kCpu, text, sizeof text, &e) == -1);

  needed = tessera_describe(text, sizeof text);
  CHECK(needed == (int64_t)strlen(text) + 1);
  CHECK(strstr(text, tessera_version()) != NULL && strstr(text, "\"compiler\"") != NULL);
}

static void names(void) {
  int32_t i = 0;
  int seen_cpu = 0;
  for (; tessera_backend_name(i); ++i) seen_cpu += strcmp(tessera_backend_name(i), "cpu") == 0;
  CHECK(i >= 2 && seen_cpu == 1);
  CHECK(strcmp(tessera_backend_name(i - 1), "reference") == 0);
  CHECK(tessera_backend_name(-1) == NULL && tessera_backend_name(i + 7) == NULL);
}

static void utilities(void) {
  /* Two parts that saw one key each: lse 0 and log 3, so weights 1/4 and 3/4. */
  tessera_tensor o, lse;
  float o1[4] = {0, 4, 8, 12}, o2[4] = {4, 4, 4, 4}, out[4], out_lse[1];
  float lse1[1] = {0}, lse2[1];
  const void *o_data[2], *lse_data[2];
  tessera_tensor o_parts[2], lse_parts[2];
  const int64_t state[2] = {5, 0};
  uint8_t keep[2 * 16 * 16];
  tessera_error e = new_error();
  int i, kept = 0;
  lse2[0] = (float)log(3.0);
  describe(&o, TESSERA_FP32, 1, 1, 1, 4);
  describe(&lse, TESSERA_FP32, 1, 1, 1, 1);
  o_parts[0] = o_parts[1] = o;
  lse_parts[0] = lse_parts[1] = lse;
  o_data[0] = o1, o_data[1] = o2;
  lse_data[0] = lse1, lse_data[1] = lse2;
  CHECK(tessera_merge(2, TESSERA_BSHD, o_parts, o_data, lse_parts, lse_data, &o, out, &lse, out_lse,
                      &kCpu, NULL, &e) == TESSERA_OK);
  for (i = 0; i < 4; ++i) CHECK(fabs(out[i] - (o1[i] + 3 * o2[i]) / 4) < 1e-5);
  CHECK(fabs(out_lse[0] - log(4.0)) < 1e-6);
  CHECK(tessera_merge(2, TESSERA_BSHD, o_parts, o_data, lse_parts, lse_data, &o, o1, &lse, out_lse,
                      &kCpu, NULL, &e) == TESSERA_INVALID);
  CHECK(strstr(e.message, "tessera.merge: o.data=") == e.message);

  CHECK(tessera_dropout_mask(1, 2, 16, 16, 0.5, state, keep, &kCpu, NULL, &e) == TESSERA_OK);
  for (i = 0; i < (int)sizeof keep; ++i) kept += keep[i];
  CHECK(kept > 180 && kept < 332);
  CHECK(tessera_dropout_mask(1, 2, 16, 16, 1.5, state, keep, &kCpu, NULL, &e) == TESSERA_INVALID);
  CHECK(strstr(e.message, "tessera.dropout_mask: dropout_p=1.5") == e.message);
}

int main(void) {
  runs();
  errors();
  refusals();
  struct_sizes();
  outputs();
  later_fields();
  texts();
  names();
  utilities();
  if (failures == 0) printf("c_api_test: all checks passed\n");
  return failures != 0;
}
