// SPDX-License-Identifier: Apache-2.0
// The problem: what is asked, without pointers. It is tessera_problem from the C header, compared
// and hashed as bytes; this header adds the questions that every folder asks of it.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <type_traits>

#include "core/problem/dtype.h"
#include "core/status.h"
#include "tessera.h"

namespace tessera {

using Tensor = tessera_tensor;
using Problem = tessera_problem;
using Buffers = tessera_buffers;
using Device = tessera_device;
static_assert(std::has_unique_object_representations_v<Problem>);  // a float or a hole breaks this

// ---- one row per tensor: the single table that validation, printing and bindings loop over ----

enum class Role : uint8_t { kInput, kForwardOutput, kBackwardInput, kBackwardOutput };

struct TensorRule {
  tessera_index index;
  const char* name;  // the keyword of the Python API: "q", "page_table", "dalibi_slopes"
  int rank;          // own axes; those beyond are ignored
  Role role;         // O and LSE are kForwardOutput and are read by backward
};
const TensorRule& tensor_rule(int index);

// The keyword a caller used: as the table, but "keep" or "drop" for the mask.
const char* name_of(const tessera_problem& problem, int index);

// ---- derived sizes ----

struct Sizes {
  int64_t batch;    // sequences
  int64_t sq, sk;   // extents: padded length, or tokens t of a thd side, or max_pages * page_size
  int64_t hq, hk;   // heads; hq % hk == 0
  int64_t dqk, dv;  // head dims
  int64_t group() const { return hq / hk; }
};
Sizes sizes_of(const Problem& problem);  // of a validated problem

inline bool given(const Problem& p, int index) { return p.tensor[index].dtype != TESSERA_NONE; }
inline bool has(const Problem& p, uint32_t flag) { return (p.flags & flag) != 0; }
inline bool is_backward(const Problem& p) { return p.pass == TESSERA_BACKWARD; }
inline bool is_paged(const Problem& p) { return given(p, TESSERA_PAGE_TABLE_K); }
inline bool is_thd_q(const Problem& p) { return p.format_q == TESSERA_THD; }
inline bool is_thd_k(const Problem& p) { return p.format_kv == TESSERA_THD && !is_paged(p); }
inline bool has_sink(const Problem& p) {
  return given(p, TESSERA_SINK) || has(p, TESSERA_SINK_OFF_BY_ONE);
}

// Written by this problem's pass.
bool is_output(const Problem& problem, int index);

// Both sides have the same lengths for all that a problem can show, so that the diagonal is the
// same for either alignment: equal extents and no lengths given, or one array for both sides; and
// both begin at position 0.
bool lengths_known_equal(const Problem& problem);

// The scalars for fp32 kernels. They are moved, beyond what fp32 can follow, to an edge where the
// function is the same: a softcap above 2^60 bends nothing and one below 2^-60 leaves nothing; a
// scale of 2^100, or 2^60 softcaps, tells any two scores apart. softcap_of: 0 = off.
double softmax_scale_of(const Problem& problem, const Buffers& buffers);
double softcap_of(const Problem& problem, const Buffers& buffers);

int64_t element_count(const Tensor& t, int rank);
inline int64_t offset_of(const Tensor& t, int64_t a, int64_t b = 0, int64_t c = 0, int64_t d = 0) {
  return a * t.stride[0] + b * t.stride[1] + c * t.stride[2] + d * t.stride[3];
}
// Elements of an axis that have places of their own: one where it is expanded.
inline int64_t distinct(const Tensor& t, int axis) {
  return t.stride[axis] == 0 && t.extent[axis] > 1 ? 1 : t.extent[axis];
}

// Index on an axis that may be broadcast: extent 1 always answers 0.
inline int64_t broadcast(const Tensor& t, int axis, int64_t i) {
  return t.extent[axis] == 1 ? 0 : i;
}

// ---- what the front door does with a caller's struct ----

// The caller's struct as this library knows it: the caller's own bytes where the sizes agree, else
// its struct_size bytes over a zeroed `storage`; refuses unknown non-zero tail bytes.
// import_buffers without a caller's struct answers the defaults.
Result<const Problem*> import_problem(const tessera_problem* caller, Problem& storage);
Result<const Buffers*> import_buffers(const tessera_buffers* caller, Buffers& storage);

// Fills derived defaults and blanks what has no meaning (axes beyond the rank, strides of axes of
// extent <= 1, windows without TESSERA_WINDOW, causal folded into the window), so that equal
// problems are equal bytes. Only of a problem that validate() accepted.
Problem normalised(const Problem& problem);

// Everything that docs/semantics.md calls illegal and that shapes alone can show.
Status validate(const Problem& problem);

// The dtype of an output, o or do whose caller asks for none: one that validate() accepts beside the
// others, which may be any enum tessera_dtype.
int32_t usual_dtype(const Problem& problem, int index);

// The problem with the tensors `wanted` described, contiguous in the order of the caller's format:
// what its pass writes, or in the backward pass o, lse, do and dlse. A dtype that one has already is
// kept, else it is the usual one. What comes back is what validate() accepts.
Result<Problem> with_outputs(const Problem& problem, std::span<const int32_t> wanted);

// Everything that pointers and scalars add: nulls, NaN scale, overlap of outputs, workspace; and on
// the CPU the values of lengths and tables. Nothing has been written when this fails.
Status validate(const Problem& problem, const Buffers& buffers, const Device& device);

// "fwd bf16 b=2 sq=1024 ... causal": the case line of docs/cases.md that describes the problem as
// nearly as the case language can (values of lengths and masks are not in a problem).
std::string to_case(const Problem& problem);

// "[2, 5, 3, 64]" in the caller's order of axes (format decides), for messages.
std::string shape_text(const Problem& problem, int index);

// The caller's order of axes of a tensor, as indices of extent[]: {1, 0, 2, 3} for q in sbhd. Axes
// that the caller does not have (the batch of thd) are left out.
struct AxisOrder {
  int count;
  int axis[4];
};
AxisOrder caller_order(const Problem& problem, int index);

// TESSERA_FAILED where buffers.interrupt has ended the call.
Status check_interrupt(const Buffers& buffers);

size_t hash_of(const Problem& problem);
bool same(const Problem& a, const Problem& b);

}  // namespace tessera
