/* SPDX-License-Identifier: Apache-2.0
 *
 * tessera: dot-product attention, softmax(Q K^T * scale + bias, masked) V, forward and backward.
 *
 * Three nouns:
 *   tessera_problem  what is computed: shapes, strides, dtypes, masks. Integers only, no pointers.
 *   tessera_buffers  with what: one pointer for each tensor of the problem, and the scalars.
 *   tessera_device   where.
 *
 * Every tensor is described by a tessera_tensor in problem.tensor[] and found at the same index of
 * buffers.data[]. A tensor whose dtype is 0 is not given. Zero means "default" for every field, so
 *   tessera_problem p = {0}; p.struct_size = sizeof p;
 * is the start of every program. What the fields mean is in docs/semantics.md.
 *
 * The library keeps nothing but a bounded plan cache, never prints, never aborts, and reads the
 * environment once. All functions may be called from any thread at any time.
 */
#ifndef TESSERA_H_
#define TESSERA_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(_WIN32)
#define TESSERA_API
#else
#define TESSERA_API __attribute__((visibility("default")))
#endif

enum tessera_code {
  TESSERA_OK = 0,
  TESSERA_INVALID = 1,       /* the call is illegal by docs/semantics.md */
  TESSERA_REFUSED = 2,       /* legal, but no enabled backend can do it */
  TESSERA_OUT_OF_MEMORY = 3, /* host memory ran out */
  TESSERA_FAILED = 4         /* the device or the system failed: the message says how */
};

enum tessera_pass { TESSERA_FORWARD = 0, TESSERA_BACKWARD = 1 };

enum tessera_dtype {
  TESSERA_NONE = 0, /* this tensor is not given */
  TESSERA_FP32 = 1,
  TESSERA_BF16 = 2,
  TESSERA_FP16 = 3,
  TESSERA_FP64 = 4,
  TESSERA_E4M3 = 5, /* float8_e4m3fn */
  TESSERA_E5M2 = 6,
  TESSERA_BOOL = 7, /* one byte, 0 or 1 */
  TESSERA_INT32 = 8,
  TESSERA_INT64 = 9
};

/* Names for the order of axes in memory; kernels see strides only. The format decides how lengths
 * are given (seqlens or cu_seqlens), how lse is laid out, and how messages print a shape. */
enum tessera_format { TESSERA_BSHD = 0, TESSERA_SBHD = 1, TESSERA_BHSD = 2, TESSERA_THD = 3 };

/* Comments stand in columns from here on. */
/* clang-format off */
enum tessera_align {
  TESSERA_ALIGN_NONE = 0,     /* not given */
  TESSERA_ALIGN_TOP_LEFT = 1, /* shift 0 */
  TESSERA_ALIGN_BOTTOM_RIGHT = 2, /* shift len_k - len_q, per sequence */
  TESSERA_ALIGN_GIVEN = 3     /* problem.shift, or the SHIFT tensor where it is given */
};

enum tessera_flags {
  TESSERA_CAUSAL = 1 << 0,           /* keys j <= i + shift */
  TESSERA_WINDOW = 1 << 1,           /* window_left and window_right are given */
  TESSERA_MASK_DROP = 1 << 2,        /* MASK true = hidden (drop=); without: true = visible (keep=) */
  TESSERA_BIAS_PRE_SCALE = 1 << 3,   /* BIAS is added before softmax_scale is applied */
  TESSERA_SOFTMAX_SCALE = 1 << 4,    /* buffers.softmax_scale is given; without: 1/sqrt(dqk) */
  TESSERA_SOFTCAP = 1 << 5,          /* buffers.softcap is given and > 0 */
  TESSERA_DROPOUT = 1 << 6,          /* buffers.dropout_p is given and > 0; needs RNG_STATE */
  TESSERA_SINK_OFF_BY_ONE = 1 << 7,  /* a sink of 0 without gradient; excludes the SINK tensor */
  TESSERA_DETERMINISTIC = 1 << 8,
  TESSERA_BATCH_INVARIANT = 1 << 9,
  TESSERA_ALLOW_QUADRATIC = 1 << 10, /* permit a path that allocates O(sq*sk) */
  TESSERA_SAME_LENGTHS = 1 << 11,    /* one array gives the lengths of both sides */
  TESSERA_MAX_SEQLEN_Q = 1 << 12,    /* max_seqlen_q is given */
  TESSERA_MAX_SEQLEN_K = 1 << 13,    /* max_seqlen_k is given */
  TESSERA_PARTIAL = 1 << 14,         /* backward: O and LSE belong to a union of which this is a part */
  TESSERA_ACCUMULATE = 1 << 15,      /* outputs are added to what they hold */
  TESSERA_V_IN_K = 1 << 16,          /* v has k's strides and begins where k begins (MLA) */
  TESSERA_FP8_PRODUCTS = 1 << 17,    /* 16-bit inputs, multiplied as fp8 */
  TESSERA_SMOOTH_MEAN = 1 << 18,     /* fp8: k less its mean over the keys */
  TESSERA_SMOOTH_HADAMARD = 1 << 19  /* fp8: q and k rotated by a Hadamard matrix */
};

/* Index of a tensor in problem.tensor[] and buffers.data[], with its axes.
 * b batch, sq/sk query/key extents, hq/hk heads, t tokens of a packed buffer (thd).
 * A thd tensor has batch extent 1 and its tokens on the seqlen axis. */
enum tessera_index {
  /* inputs of both passes */
  TESSERA_Q = 0,              /* [b, sq, hq, dqk]                    thd [1, t, hq, dqk] */
  TESSERA_K = 1,              /* [b, sk, hk, dqk]   thd [1, t, hk, dqk]   pages [pages, page_size, hk, dqk] */
  TESSERA_V = 2,              /* [b, sk, hk, dv]    likewise */
  TESSERA_BIAS = 3,           /* [b|1, hq|1, sq|1, sk|1]             thd: sq, sk are max_seqlen_q, max_seqlen_k */
  TESSERA_MASK = 4,           /* [b|1, hq|1, sq|1, sk|1] bool        likewise */
  TESSERA_KEY_RANGES = 5,     /* [b|1, hq|1, sq|1, 2|4] int32        thd [1, hq|1, t|1, 2|4] */
  TESSERA_SEGMENT_IDS_Q = 6,  /* [b, sq] int32                       thd [1, t] */
  TESSERA_SEGMENT_IDS_K = 7,  /* [b, sk] int32                       thd [1, t] */
  TESSERA_SINK = 8,           /* [hq] */
  TESSERA_ALIBI_SLOPES = 9,   /* [b|1, hq] */
  TESSERA_SEQLENS_Q = 10,     /* [b] int32 or int64 */
  TESSERA_SEQLENS_K = 11,     /* [b] */
  TESSERA_CU_SEQLENS_Q = 12,  /* [b+1] int32 or int64, thd only */
  TESSERA_CU_SEQLENS_K = 13,  /* [b+1] */
  TESSERA_CU_SEQLENS_Q_PADDED = 14, /* [b+1] where each sequence is stored */
  TESSERA_CU_SEQLENS_K_PADDED = 15, /* [b+1] */
  TESSERA_PAGE_TABLE_K = 16,  /* [b, max_pages] int32; with it K is a pool of pages */
  TESSERA_PAGE_TABLE_V = 17,  /* [b, max_pages] int32; not given: PAGE_TABLE_K serves V too */
  TESSERA_K_SCALE = 18,       /* [b|1, hk|1, nk|1] fp32: what an fp8 k is multiplied by; nk: blocks of
                               * k_scale_block keys */
  TESSERA_V_SCALE = 19,       /* [b|1, hk|1, nk|1] fp32, likewise */
  TESSERA_RNG_STATE = 20,     /* [2] int64: seed, offset; or [4]: seed, offset, first, stride */
  /* outputs of forward, inputs of backward */
  TESSERA_O = 21,             /* [b, sq, hq, dv]                     thd [1, t, hq, dv] */
  TESSERA_LSE = 22,           /* [b, hq, sq] fp32                    thd [1, hq, t]; forward writes it contiguous */
  /* output of forward only */
  TESSERA_MAX_LOGIT = 23,     /* [hq] fp32 */
  /* inputs of backward only */
  TESSERA_DO = 24,            /* as O */
  TESSERA_DLSE = 25,          /* as LSE */
  /* outputs of backward: those given are computed */
  TESSERA_DQ = 26,            /* as Q */
  TESSERA_DK = 27,            /* as K */
  TESSERA_DV = 28,            /* as V */
  TESSERA_DBIAS = 29,         /* as BIAS */
  TESSERA_DSINK = 30,         /* as SINK */
  TESSERA_DALIBI_SLOPES = 31, /* as ALIBI_SLOPES */
  /* inputs of both passes */
  TESSERA_Q_START = 32,       /* [b] int32 or int64: position of each sequence's first query */
  TESSERA_K_START = 33,       /* [b] and of its first key */
  TESSERA_SHIFT = 34,         /* [b] int32 or int64: the diagonal; needs TESSERA_ALIGN_GIVEN */
  TESSERA_Q_SCALE = 35,       /* [b|1, hq|1, nq|1] fp32: what an fp8 q is multiplied by */
  TESSERA_DO_SCALE = 36,      /* [b|1, hq|1, nq|1] fp32: and an fp8 do (backward) */
  TESSERA_O_SCALE = 37,       /* [1] fp32: what an fp8 o is multiplied by */
  TESSERA_DQ_SCALE = 38,      /* [1] fp32: and an fp8 dq */
  TESSERA_DK_SCALE = 39,      /* [1] fp32 */
  TESSERA_DV_SCALE = 40,      /* [1] fp32 */
  /* outputs: the largest absolute value before it was rounded to fp8 */
  TESSERA_AMAX_O = 41,        /* [1] fp32, forward */
  TESSERA_AMAX_DQ = 42,       /* [1] fp32, backward */
  TESSERA_AMAX_DK = 43,       /* [1] fp32 */
  TESSERA_AMAX_DV = 44,       /* [1] fp32 */
  /* input of both passes */
  TESSERA_KEEP_TAIL = 45,     /* [b|1, hq|1, sq, sq] bool: which of the last sq keys a query sees */
  TESSERA_WINDOWS = 46,       /* [b, 2] int32 or int64: left and right of each sequence's own window */
  TESSERA_NUM_TENSORS = 47
};

typedef struct tessera_tensor {
  int32_t dtype;     /* enum tessera_dtype; 0 = not given */
  int32_t reserved;  /* 0 */
  int64_t extent[4]; /* axes beyond the tensor's own are ignored */
  int64_t stride[4]; /* in elements */
} tessera_tensor;

typedef struct tessera_problem {
  uint32_t struct_size; /* sizeof(tessera_problem) of the caller */
  int32_t pass;         /* enum tessera_pass */
  uint32_t flags;       /* enum tessera_flags */
  int32_t align;        /* enum tessera_align */
  int32_t format_q;     /* enum tessera_format of q, o, dq, do */
  int32_t format_kv;    /* enum tessera_format of k, v, dk, dv; ignored with pages */
  int64_t window_left;  /* -1 = unbounded; read with TESSERA_WINDOW */
  int64_t window_right;
  int64_t max_seqlen_q; /* read with TESSERA_MAX_SEQLEN_Q */
  int64_t max_seqlen_k;
  char backend[16];     /* force one by name, NUL-padded; empty = choose */
  int32_t q_scale_block; /* rows of q that share a scale; 0: all */
  int32_t k_scale_block; /* keys that share a scale; 0: all */
  int64_t shift;        /* the diagonal; read with TESSERA_ALIGN_GIVEN where SHIFT is not given */
  int64_t reserved[4];  /* 0 */
  tessera_tensor tensor[TESSERA_NUM_TENSORS]; /* last: it may grow */
} tessera_problem;

/* body(arg, i) for i in [0, n), in any order, on any threads; returns when all are done. */
typedef void (*tessera_parallel_for)(void* context, int64_t n, void (*body)(void* arg, int64_t i),
                                     void* arg);

/* Answers `bytes` of memory on the device of the call, aligned as a workspace is, that stays until the
 * call's work is done there; NULL if there is none. */
typedef void* (*tessera_allocate)(void* context, int64_t bytes);

typedef struct tessera_buffers {
  uint32_t struct_size;
  int32_t num_threads;  /* CPU: at most this many; 0 = the library's own default */
  double softmax_scale; /* finite, >= 0; read with TESSERA_SOFTMAX_SCALE */
  double softcap;       /* finite, > 0; read with TESSERA_SOFTCAP */
  double dropout_p;     /* in (0, 1); read with TESSERA_DROPOUT */
  void* stream;         /* cudaStream_t */
  tessera_parallel_for parallel_for; /* CPU: the caller's threads instead of the library's; may be NULL */
  void* parallel_context;
  void* workspace;         /* tessera_info.workspace_bytes, 64-byte aligned on the CPU, 256 on CUDA */
  int64_t workspace_bytes;
  int32_t sm_margin;       /* CUDA: multiprocessors that kernels whose CTAs take tile after tile
                            * leave to others; 0: none */
  int32_t reserved_half;   /* 0 */
  const volatile int32_t* interrupt; /* CPU: where another thread or a signal handler stores what is
                                      * not 0, the call ends soon with TESSERA_FAILED and outputs may
                                      * hold anything; may be NULL */
  tessera_allocate allocate; /* asked once, where workspace is NULL and the call needs one: then
                              * nobody has to ask tessera_prepare; may be NULL */
  void* allocate_context;
  int64_t reserved[2];     /* 0 */
  void* data[TESSERA_NUM_TENSORS]; /* last: it may grow */
} tessera_buffers;

enum tessera_device_kind { TESSERA_CPU = 0, TESSERA_CUDA = 1 };

typedef struct tessera_device {
  int32_t kind;    /* enum tessera_device_kind */
  int32_t ordinal; /* CUDA device of the process */
  int32_t arch;    /* 80, 89, 90, ...; 0 = ask the device */
  int32_t reserved;
} tessera_device;

typedef struct tessera_info {
  uint32_t struct_size;
  int32_t reserved;
  int64_t workspace_bytes;
  char backend[16];
} tessera_info;

typedef struct tessera_error {
  uint32_t struct_size;
  int32_t code; /* enum tessera_code */
  char message[2048];
} tessera_error;

/* "1.2.3". */
TESSERA_API const char* tessera_version(void);

/* Every error argument may be NULL. Every function that returns int32_t returns tessera_error.code. */

/* Describes outputs: fills problem->tensor[wanted[i]] with the shape of docs/semantics.md, contiguous
 * in the order of the problem's format. wanted: num_wanted indices of what the pass writes, in any
 * order; of the backward pass O, LSE, DO and DLSE too. A dtype that such a tensor has is kept, its
 * extents and strides are not read; 0 is the usual one: o as q, bf16 beside an fp8 q; a gradient as
 * its input, beside fp8 ones as an o of 16 bits, else bf16; do as o. All other tensors of the problem
 * are given before, and the problem is then one that tessera_prepare takes: TESSERA_OK, or
 * TESSERA_INVALID and why, with nothing written. Allocates no device memory, synchronises nothing, asks no
 * backend. */
TESSERA_API int32_t tessera_outputs(tessera_problem* problem, const int32_t* wanted,
                                    int32_t num_wanted, tessera_error* error);

/* Validates, chooses a backend, builds and caches the plan. May be slow; tessera_run does the same
 * on a problem it has not met. num_threads as in tessera_buffers. */
TESSERA_API int32_t tessera_prepare(const tessera_problem* problem, const tessera_device* device,
                                    int32_t num_threads, tessera_info* info, tessera_error* error);

/* Computes. On a prepared problem it allocates nothing, synchronises nothing, reads no environment.
 * On the CPU it returns when the result is there; on CUDA the work is queued on buffers->stream. */
TESSERA_API int32_t tessera_run(const tessera_problem* problem, const tessera_device* device,
                                const tessera_buffers* buffers, tessera_error* error);

/* What tessera_run checks before it computes, and no more: TESSERA_OK, or TESSERA_INVALID and why.
 * Whether a backend can is not asked, a workspace is not needed, nothing is written. */
TESSERA_API int32_t tessera_validate(const tessera_problem* problem, const tessera_device* device,
                                     const tessera_buffers* buffers, tessera_error* error);

/* Which backend would run, every other one with all of its reasons, the nearest change that would
 * help, and the workspace, as JSON. Give a problem or a case text ("fwd bf16 b=2 s=1024 h=16 d=128
 * causal"), the other NULL. Writes at most capacity bytes with a final NUL; returns the bytes that
 * the whole answer needs, NUL included, or -1 with an error when the problem is illegal. */
TESSERA_API int64_t tessera_explain(const tessera_problem* problem, const char* case_text,
                                    const tessera_device* device, char* buffer, int64_t capacity,
                                    tessera_error* error);

/* Joins calls on disjoint sets of keys: from their results o_p and lse_p, p < num_parts, writes what
 * one call on all the keys would give, lse = log sum_p exp(lse_p) and o = sum_p exp(lse_p - lse) o_p.
 * All o_p have the shape of o, [b, sq, hq, dv] in the order of `format`, and one dtype. o has that
 * dtype too, or is fp32 beside parts of 16 bits, or of 16 bits beside fp32 parts. All lse_p and lse have
 * the shape that TESSERA_LSE has beside that o, in fp32, beside fp64 parts in fp64. Where lse_p = -inf,
 * o_p is not read. Outputs must not overlap the parts. */
TESSERA_API int32_t tessera_merge(int64_t num_parts, int32_t format, const tessera_tensor* o_parts,
                                  const void* const* o_data, const tessera_tensor* lse_parts,
                                  const void* const* lse_data, const tessera_tensor* o, void* o_out,
                                  const tessera_tensor* lse, void* lse_out,
                                  const tessera_device* device, const tessera_buffers* context,
                                  tessera_error* error);

/* The dropout mask of docs/semantics.md: keep[b][hq][sq][sk], 1 = kept. rng_state: seed, offset;
 * both pointers are on the device. context gives stream and threads and may be NULL. */
TESSERA_API int32_t tessera_dropout_mask(int64_t b, int64_t hq, int64_t sq, int64_t sk,
                                         double dropout_p, const int64_t* rng_state, uint8_t* keep,
                                         const tessera_device* device,
                                         const tessera_buffers* context, tessera_error* error);

/* The same of a part of a problem: rng_words says how many words rng_state has, 2, or 4 (seed,
 * offset, first, stride); q_start and k_start are int64 [b], the positions of each sequence's first
 * row and key, on the device, or NULL for 0. */
TESSERA_API int32_t tessera_dropout_mask_at(int64_t b, int64_t hq, int64_t sq, int64_t sk,
                                            double dropout_p, const int64_t* rng_state,
                                            int32_t rng_words, const int64_t* q_start,
                                            const int64_t* k_start, uint8_t* keep,
                                            const tessera_device* device,
                                            const tessera_buffers* context, tessera_error* error);

/* ---- positions and caches ---- */

enum tessera_rotary_flags {
  TESSERA_INTERLEAVED = 1 << 0, /* elements (2i, 2i + 1) are a pair; without: (i, i + r/2) */
  TESSERA_INVERSE = 1 << 1      /* turn back: what the gradient needs (tessera_rotate) */
};

/* Tensors of tessera_rotate. r <= d, the elements that turn; the others pass. */
enum tessera_rotate_index {
  TESSERA_ROTATE_X = 0,         /* [b, s, h, d] fp32, bf16, fp16 or fp64      thd [1, t, h, d] */
  TESSERA_ROTATE_Y = 1,         /* as X; may be X itself */
  TESSERA_ROTATE_COS = 2,       /* [max_pos, r/2] fp32 */
  TESSERA_ROTATE_SIN = 3,       /* likewise */
  TESSERA_ROTATE_POSITIONS = 4, /* [b|1, s|1] int32 or int64; one column: of a sequence's first row,
                                 * the others follow; not given: 0, 1, 2, ... */
  TESSERA_ROTATE_TENSORS = 8
};

typedef struct tessera_rotate_args {
  uint32_t struct_size;
  int32_t format; /* enum tessera_format of x and y */
  uint32_t flags; /* enum tessera_rotary_flags */
  int32_t reserved_half;
  int64_t reserved[4];
  tessera_tensor tensor[TESSERA_ROTATE_TENSORS];
  void* data[TESSERA_ROTATE_TENSORS];
} tessera_rotate_args;

/* Rotary position embedding (Su et al., arXiv:2104.09864): a pair (a, b) of a row at position p
 * becomes (a cos - b sin, b cos + a sin), cos = COS[p][i], sin = SIN[p][i] of pair i, in fp32. On the
 * CPU a position outside the table is an error; on CUDA its row becomes NaN. */
TESSERA_API int32_t tessera_rotate(const tessera_rotate_args* args, const tessera_device* device,
                                   const tessera_buffers* context, tessera_error* error);

/* Tensors of tessera_append: new tokens of each sequence, behind those that the cache holds. */
enum tessera_append_index {
  TESSERA_APPEND_K = 0,          /* [b, s, hk, dqk]            thd [1, t, hk, dqk] */
  TESSERA_APPEND_V = 1,          /* [b, s, hk, dv]             likewise; not given: no V_CACHE (MLA) */
  TESSERA_APPEND_K_CACHE = 2,    /* [b, sk, hk, dqk]           pages [pages, page_size, hk, dqk] */
  TESSERA_APPEND_V_CACHE = 3,    /* [b, sk, hk, dv]            likewise */
  TESSERA_APPEND_SEQLENS = 4,    /* [b] int32 or int64: tokens that the cache holds before the call */
  TESSERA_APPEND_CU_SEQLENS = 5, /* [b+1] int32 or int64, thd only */
  TESSERA_APPEND_PAGE_TABLE = 6, /* [b, max_pages] int32; with it the caches are pools of pages */
  TESSERA_APPEND_K_SCALE = 7,    /* [b|1, hk] fp32 beside fp8 caches: k is k_cache * k_scale */
  TESSERA_APPEND_V_SCALE = 8,    /* [b|1, hk] fp32 */
  TESSERA_APPEND_COS = 9,        /* [max_pos, r/2] fp32: k and q turn by their position */
  TESSERA_APPEND_SIN = 10,       /* likewise */
  TESSERA_APPEND_Q = 11,         /* [b, s, hq, dqk]            thd [1, t, hq, dqk]; needs COS */
  TESSERA_APPEND_Q_OUT = 12,     /* as Q; may be Q itself */
  TESSERA_APPEND_SEQLENS_Q = 13, /* [b] int32 or int64, not thd: how many of the s tokens of a sequence
                                  * are new, the first ones; not given: all */
  TESSERA_APPEND_TENSORS = 16
};

typedef struct tessera_append_args {
  uint32_t struct_size;
  int32_t format; /* enum tessera_format of k, v, q and q_out */
  uint32_t flags; /* TESSERA_INTERLEAVED */
  int32_t reserved_half;
  int64_t reserved[4];
  tessera_tensor tensor[TESSERA_APPEND_TENSORS];
  void* data[TESSERA_APPEND_TENSORS];
} tessera_append_args;

/* Token i of sequence n goes to place seqlens[n] + i of the caches, converted to their dtype (fp8:
 * round(x / scale), the quotient in fp32, saturating) and turned by that position where COS is given.
 * Other places are left as they are; rows of Q_OUT beyond SEQLENS_Q are 0. On the CPU a token that has
 * no place is an error, and nothing is written; on CUDA it is dropped. */
TESSERA_API int32_t tessera_append(const tessera_append_args* args, const tessera_device* device,
                                   const tessera_buffers* context, tessera_error* error);

/* ---- rows between tensors ---- */

enum { TESSERA_MAX_TERMS = 8 };

/* Rows of a tensor: element (r, h, c) lies, in bytes, offset + index[r] * row + h * head and c elements
 * behind the tensor's data. */
typedef struct tessera_rows {
  int32_t tensor; /* which of the call's tensors */
  int32_t index;  /* which of them holds the rows' numbers, int64 [rows]; -1: index[r] = r */
  int32_t dtype;  /* enum tessera_dtype of the rows; a tensor of messages may hold several */
  int32_t reserved;
  int64_t offset, row, head;
} tessera_rows;

/* to(r, h, c) = the sum of term[i](r, h, c), i < num_terms, for r < rows, h < heads, c < columns. */
typedef struct tessera_row_sum {
  int64_t rows, heads, columns;
  int32_t num_terms; /* 0 to TESSERA_MAX_TERMS; of none, rows become 0 */
  int32_t reserved;
  tessera_rows to;
  tessera_rows term[TESSERA_MAX_TERMS];
} tessera_row_sum;

/* Any number of such sums, in any order, as few launches as can be: what context parallelism does with
 * messages. One term of the dtype of `to`, which may be any, is copied. Otherwise `to` and each term are fp32,
 * bf16, fp16 or, on the CPU, fp64, and terms are added in order, in fp32 (fp64 where any of them is), and
 * rounded once. A term may be `to` itself; nothing else that is written may be read or written by the same call. */
TESSERA_API int32_t tessera_sum_rows(int64_t num_sums, const tessera_row_sum* sums,
                                     int64_t num_tensors, void* const* tensors,
                                     const tessera_device* device, const tessera_buffers* context,
                                     tessera_error* error);

/* Name of the i-th backend in order of preference, or NULL past the last. */
TESSERA_API const char* tessera_backend_name(int32_t i);

/* What this build and this machine are, as JSON: version, compiler, backends with why-not, CPU
 * level and threads, CUDA devices. Buffer rules as tessera_explain. */
TESSERA_API int64_t tessera_describe(char* buffer, int64_t capacity);

/* topic is "dispatch", "plan", "checks", ...; TESSERA_LOG names those that are on. NULL: no log. */
typedef void (*tessera_log_callback)(void* user, const char* topic, const char* message);
TESSERA_API void tessera_set_log(tessera_log_callback callback, void* user);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* TESSERA_H_ */
