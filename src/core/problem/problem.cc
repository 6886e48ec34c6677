// SPDX-License-Identifier: Apache-2.0
#include "core/problem/problem.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstring>

#include "core/count.h"
#include "core/mask/sequence.h"
#include "core/problem/import.h"

namespace tessera {
namespace {

constexpr TensorRule kRules[TESSERA_NUM_TENSORS] = {
#define TESSERA_TENSOR(INDEX, name, keyword, rank, role, rule) \
  {TESSERA_##INDEX, #keyword, rank, Role::role},
#include "core/problem/tensors.def"
#undef TESSERA_TENSOR
};
constexpr bool in_order() {
  for (int i = 0; i < TESSERA_NUM_TENSORS; ++i) {
    if (kRules[i].index != i) return false;
  }
  return true;
}
static_assert(in_order(), "tensors.def has the order of enum tessera_index");

// max_seqlen of a packed side, no more than its tokens unless a dense mask or bias has that extent.
int64_t longest(const Problem& p, int axis, int64_t max_seqlen, int64_t tokens) {
  for (const int i : {TESSERA_BIAS, TESSERA_MASK}) {
    if (given(p, i) && p.tensor[i].extent[axis] != 1) return max_seqlen;
  }
  return std::min(max_seqlen, tokens);
}

// A 64-bit multiply-mix in three lanes, so that the multiplications overlap: a tensor is 9 words.
class Hash {
 public:
  // The input is a multiple of 24 bytes.
  void add(const void* data, size_t bytes) {
    const auto* at = static_cast<const unsigned char*>(data);
    for (; bytes != 0; bytes -= 24, at += 24) {
      uint64_t word[3];
      std::memcpy(word, at, 24);
      a_ = std::rotl(a_ ^ word[0], 29) * kOdd;
      b_ = std::rotl(b_ ^ word[1], 29) * kOdd;
      c_ = std::rotl(c_ ^ word[2], 29) * kOdd;
    }
  }
  void add(uint64_t word) { a_ = std::rotl(a_ ^ word, 29) * kOdd; }
  uint64_t value() const {
    uint64_t hash = (a_ ^ std::rotl(b_, 21) ^ std::rotl(c_, 43)) * kOdd;
    hash = (hash ^ hash >> 32) * kOdd;
    return hash ^ hash >> 29;
  }

 private:
  static constexpr uint64_t kOdd = 0x9E3779B97F4A7C15u;
  uint64_t a_ = 0x243F6A8885A308D3u, b_ = 0x13198A2E03707344u, c_ = 0xA4093822299F31D0u;
};
static_assert(offsetof(Problem, tensor) % 24 == 0 && sizeof(Tensor) % 24 == 0);

}  // namespace

const TensorRule& tensor_rule(int index) { return kRules[index]; }

const char* name_of(const Problem& problem, int index) {
  if (index == TESSERA_MASK) return has(problem, TESSERA_MASK_DROP) ? "drop" : "keep";
  return kRules[index].name;
}

bool is_output(const Problem& problem, int index) {
  return kRules[index].role ==
         (is_backward(problem) ? Role::kBackwardOutput : Role::kForwardOutput);
}

Sizes sizes_of(const Problem& p) {
  const Tensor& q = p.tensor[TESSERA_Q];
  const Tensor& k = p.tensor[TESSERA_K];
  Sizes s{};
  s.batch = is_thd_q(p) ? p.tensor[TESSERA_CU_SEQLENS_Q].extent[0] - 1 : q.extent[0];
  s.sq = q.extent[1];
  s.sk = is_paged(p) ? p.tensor[TESSERA_PAGE_TABLE_K].extent[1] * k.extent[1] : k.extent[1];
  s.hq = q.extent[2];
  s.hk = k.extent[2];
  s.dqk = q.extent[3];
  s.dv = p.tensor[TESSERA_V].extent[3];
  return s;
}

bool lengths_known_equal(const Problem& p) {
  if (is_paged(p) || given(p, TESSERA_Q_START) || given(p, TESSERA_K_START)) return false;
  if (has(p, TESSERA_SAME_LENGTHS)) return true;
  for (const int i :
       {TESSERA_SEQLENS_Q, TESSERA_SEQLENS_K, TESSERA_CU_SEQLENS_Q, TESSERA_CU_SEQLENS_K}) {
    if (given(p, i)) return false;
  }
  return p.tensor[TESSERA_Q].extent[1] == p.tensor[TESSERA_K].extent[1];
}

double softmax_scale_of(const Problem& p, const Buffers& buffers) {
  const double most = has(p, TESSERA_SOFTCAP) ? 0x1p60 * softcap_of(p, buffers) : 0x1p100;
  if (has(p, TESSERA_SOFTMAX_SCALE)) return std::min(buffers.softmax_scale, most);
  return 1 / std::sqrt(static_cast<double>(sizes_of(p).dqk));
}

double softcap_of(const Problem& p, const Buffers& buffers) {
  if (!has(p, TESSERA_SOFTCAP)) return 0;
  return std::clamp(buffers.softcap, 0x1p-60, 0x1p60);
}

int64_t element_count(const Tensor& t, int rank) {
  Count count = 1;
  for (int axis = 0; axis < rank; ++axis) count *= t.extent[axis];
  return count.value();
}

Result<const Problem*> import_problem(const tessera_problem* caller, Problem& storage) {
  if (!caller) return invalid("problem=NULL: must point to a tessera_problem");
  auto ours = import_struct(caller, storage, offsetof(tessera_problem, tensor), "problem");
  // A caller that knows no later tensor knows two axes of scales, and left the third to chance.
  constexpr size_t kTwoAxes = offsetof(tessera_problem, tensor[TESSERA_Q_START]);
  if (ours.ok() && caller->struct_size <= kTwoAxes) {
    for (const int index : {TESSERA_K_SCALE, TESSERA_V_SCALE}) {
      storage.tensor[index].extent[2] = given(storage, index) ? 1 : 0;
      storage.tensor[index].stride[2] = 0;
    }
  }
  return ours;
}

Result<const Buffers*> import_buffers(const tessera_buffers* caller, Buffers& storage) {
  if (caller) return import_struct(caller, storage, offsetof(tessera_buffers, data), "buffers");
  storage = Buffers{};
  storage.struct_size = sizeof storage;
  return &storage;
}

Problem normalised(const Problem& problem) {
  Problem p = problem;
  for (int i = 0; i < TESSERA_NUM_TENSORS; ++i) {
    Tensor& t = p.tensor[i];
    if (t.dtype == TESSERA_NONE) {
      t = Tensor{};
      continue;
    }
    const int rank = kRules[i].rank;
    const bool empty = element_count(t, rank) == 0;
    for (int axis = 0; axis < 4; ++axis) {
      if (axis >= rank) t.extent[axis] = 0;
      if (axis >= rank || empty || t.extent[axis] <= 1) t.stride[axis] = 0;
    }
  }
  if (is_paged(p)) p.format_kv = TESSERA_BSHD;

  const Sizes s = sizes_of(p);
  // A window side this wide hides nothing, unless the diagonal lies elsewhere.
  const bool elsewhere =
      p.align == TESSERA_ALIGN_GIVEN || given(p, TESSERA_Q_START) || given(p, TESSERA_K_START);
  const int64_t reach = elsewhere ? INT64_MAX : std::max(s.sq, s.sk);
  int64_t left = has(p, TESSERA_WINDOW) ? p.window_left : -1;
  int64_t right = has(p, TESSERA_CAUSAL) ? 0 : has(p, TESSERA_WINDOW) ? p.window_right : -1;
  if (left >= reach) left = -1;
  if (right > 0 && right >= reach) right = -1;
  p.flags &= ~uint32_t{TESSERA_CAUSAL | TESSERA_WINDOW};
  if (left >= 0 || right >= 0) p.flags |= TESSERA_WINDOW;
  p.window_left = has(p, TESSERA_WINDOW) ? left : 0;
  p.window_right = has(p, TESSERA_WINDOW) ? right : 0;

  if (!has_band(p) && !given(p, TESSERA_ALIBI_SLOPES)) {
    p.align = TESSERA_ALIGN_NONE;
  } else if (p.align == TESSERA_ALIGN_GIVEN) {
    if (!given(p, TESSERA_SHIFT) && p.shift == 0) p.align = TESSERA_ALIGN_TOP_LEFT;
  } else if (lengths_known_equal(p)) {
    p.align = TESSERA_ALIGN_TOP_LEFT;
  }
  if (p.align != TESSERA_ALIGN_GIVEN) p.tensor[TESSERA_SHIFT] = Tensor{};
  if (p.align != TESSERA_ALIGN_GIVEN || given(p, TESSERA_SHIFT)) p.shift = 0;

  p.max_seqlen_q = has(p, TESSERA_MAX_SEQLEN_Q) ? longest(p, 2, p.max_seqlen_q, s.sq) : 0;
  p.max_seqlen_k = has(p, TESSERA_MAX_SEQLEN_K) ? longest(p, 3, p.max_seqlen_k, s.sk) : 0;
  if (!given(p, TESSERA_BIAS)) p.flags &= ~uint32_t{TESSERA_BIAS_PRE_SCALE};
  if (!has(p, TESSERA_DROPOUT)) p.tensor[TESSERA_RNG_STATE] = Tensor{};
  char name[sizeof p.backend] = {};
  std::memcpy(name, p.backend, strnlen(p.backend, sizeof p.backend));
  std::memcpy(p.backend, name, sizeof name);
  return p;
}

Status check_interrupt(const Buffers& buffers) {
  if (!buffers.interrupt || *buffers.interrupt == 0) return {};
  return failed("interrupted: outputs hold nothing of use");
}

size_t hash_of(const Problem& p) {
  Hash hash;
  hash.add(&p, offsetof(Problem, tensor));
  for (int i = 0; i < TESSERA_NUM_TENSORS; ++i) {
    if (!given(p, i)) continue;
    hash.add(static_cast<uint64_t>(i));
    hash.add(&p.tensor[i], sizeof(Tensor));
  }
  return hash.value();
}

bool same(const Problem& a, const Problem& b) { return std::memcmp(&a, &b, sizeof a) == 0; }

}  // namespace tessera
