// SPDX-License-Identifier: Apache-2.0
// The case language: one line of text that says a whole problem, data included (docs/cases.md).
//
//   fwd bf16 b=2 sq=1024 sk=4096 hq=16 hk=4 dqk=192 dv=128 layout=sbhd causal align=bottom_right
//
// parse_case reads it, to_text prints it back canonically, geometry_of turns it into a problem
// without allocating a tensor. src/conformance fills the tensors.
#pragma once

#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "core/case/per_sequence.h"
#include "core/problem/problem.h"

namespace tessera {

class JsonWriter;

// lens=LIST of one side: full | n,n,... | random:SEED.
struct CaseLengths {
  enum class Kind : uint8_t { kAbsent, kFull, kList, kRandom };
  Kind kind = Kind::kAbsent;
  std::vector<int64_t> list;
  uint32_t seed = 0;
  bool operator==(const CaseLengths&) const = default;
};

struct CaseGaps {
  enum class Kind : uint8_t { kNone, kFixed, kRandom };
  Kind kind = Kind::kNone;
  int64_t value = 0;  // tokens, or the seed
  bool operator==(const CaseGaps&) const = default;
};

struct CaseMask {
  enum class What : uint8_t { kNone, kRandom, kKeys, kBlocks };
  What what = What::kNone;
  bool drop = false;  // drop= stores the complement of keep= with the same words
  double p = 0;       // of being visible
  std::string shape;  // letters of b, h, q, k that are not broadcast
  bool operator==(const CaseMask&) const = default;
};

// bias_low=VALUE,WHERE: elements of the bias that are one finite low number.
struct CaseBiasLow {
  enum class Where : uint8_t { kNone, kRandom, kKeys, kRows, kBlocks, kFrom, kCausal };
  Where where = Where::kNone;
  double value = 0;  // as far as the bias's dtype reaches; kMinimum: its minimum
  double p = 0;      // of being low
  int64_t from = 0;  // the first low key
  static constexpr double kMinimum = -std::numeric_limits<double>::max();
  bool operator==(const CaseBiasLow&) const = default;
};

struct CaseRanges {
  enum class Kind : uint8_t { kNone, kRandom, kTwo, kPrefix };
  Kind kind = Kind::kNone;
  int64_t value = 0;  // the seed, or the length of the prefix
  bool operator==(const CaseRanges&) const = default;
};

struct CaseSegments {
  // Each id once, in order; each three times, in the same order; every token's drawn on its own.
  enum class Kind : uint8_t { kOnce, kAgain, kRandom };
  Kind kind = Kind::kOnce;
  int64_t ids = 0;  // how many; 0 = no segments
  bool operator==(const CaseSegments&) const = default;
};

// qscale= and kvscale=: one scale for everything, one for each head, or one for each row of q or
// block of 128 keys of each sequence and head.
enum class CaseScale : uint8_t { kNone, kOne, kHead, kFine };
inline constexpr int32_t kCaseScaleRows = 1, kCaseScaleKeys = 128;

// shift=: one number for all sequences, or drawn for each.
struct CaseShift {
  enum class Kind : uint8_t { kNone, kOne, kRandom };
  Kind kind = Kind::kNone;
  int64_t value = 0;  // of one; the seed
  bool operator==(const CaseShift&) const = default;
};

// What the layout token says: formats, and which of q, k, v share one buffer.
struct CaseLayout {
  enum class Packing : uint8_t {
    kSeparate,
    kQkvBeforeHeads,  // 3hd: [..., 3, h, d]
    kQkvAfterHeads,   // h3d: [..., h, 3, d]
    kKvBeforeHeads,   // 2hd
    kKvAfterHeads,    // h2d
  };
  std::string name = "bshd";  // as written
  int32_t format_q = TESSERA_BSHD;
  int32_t format_kv = TESSERA_BSHD;
  Packing packing = Packing::kSeparate;
  bool operator==(const CaseLayout&) const = default;
};

struct Case {
  enum class BiasAt : uint8_t { kNone, kPost, kPre };
  enum class Alibi : uint8_t { kNone, kPerHead, kPerBatchHead };
  enum class Sink : uint8_t { kNone, kOffByOne, kLearnable };

  int32_t pass = TESSERA_FORWARD;
  int32_t dtype = TESSERA_NONE;
  int32_t kv_dtype = TESSERA_NONE;  // NONE: as dtype
  int64_t b = -1, sq = -1, sk = -1, hq = -1, hk = -1, dqk = -1, dv = -1;
  CaseLayout layout;
  CaseLengths lens, lens_q, lens_k;  // lens excludes the other two
  CaseGaps gaps;
  int64_t page = 0;  // tokens of a page; 0 = not paged
  int64_t tables = 1;
  bool int64_lengths = false;
  bool causal = false;
  bool window = false;
  int64_t window_left = -1, window_right = -1;
  int32_t align = TESSERA_ALIGN_NONE;
  CaseShift shift;
  bool has_windows = false;  // drawn for each sequence
  uint32_t windows_seed = 0;
  CaseLengths q_start, k_start;  // positions; kFull is never here
  CaseMask mask;
  CaseRanges ranges;
  CaseSegments segments;
  bool has_scale = false;
  double scale = 0;
  double softcap = 0;  // 0 = off
  BiasAt bias = BiasAt::kNone;
  std::string bias_shape;
  double bias_inf = 0;  // share of the bias that is -inf
  CaseBiasLow bias_low;
  int32_t bias_dtype = TESSERA_NONE;  // of bias, learnable sink and slopes; NONE: q's
  Alibi alibi = Alibi::kNone;
  Sink sink = Sink::kNone;
  double sink_value = 0;    // of every learnable sink; 0: drawn
  double dropout = 0;       // 0 = off
  bool four_words = false;  // of rng_state
  int64_t rng_first = 0, rng_stride = 0;
  uint32_t flags = 0;  // those that are tokens of their own
  CaseScale q_scale = CaseScale::kNone, kv_scale = CaseScale::kNone;
  int32_t do_dtype = TESSERA_NONE, o_dtype = TESSERA_NONE, grad_dtype = TESSERA_NONE;
  bool amax = false;
  bool fp8_products = false;
  uint32_t smooth = 0;  // TESSERA_SMOOTH_MEAN and TESSERA_SMOOTH_HADAMARD
  bool has_smooth = false;
  std::string data = "normal";  // how q, k, v and do are distributed
  bool dlse = false;
  bool dbias = false, dsink = false, dalibi_slopes = false;
  bool max_logit = false, no_lse = false;
  bool longest = false;  // the caller says the longest of packed sequences
  bool strided = false, expanded = false, interleaved = false, out = false, poison = false;
  uint32_t seed = 0;

  bool has(uint32_t flag) const { return (flags & flag) != 0; }
  bool operator==(const Case&) const = default;
};

// A problem with everything that the case says beside it. Tensors that share a buffer have one
// owner; offset is in elements from the start of the owner's buffer.
struct CaseGeometry {
  Problem problem;
  int owner[TESSERA_NUM_TENSORS];
  int64_t offset[TESSERA_NUM_TENSORS];
  PerSequence len_q, len_k;            // [b] true lengths
  PerSequence start_q, start_k;        // [b + 1] thd: where each sequence is stored; else empty
  PerSequence position_q, position_k;  // [b] of first rows, where q_start, k_start are given
  PerSequence shift;                   // [b] with shift=random
  PerSequence windows;                 // [b, 2] with windows
  double softmax_scale, softcap, dropout_p;

  // Where dense masks and biases have the first row and key of sequence n.
  int64_t dense_start_q(int64_t n) const {
    return start_q.empty() || position_q.empty() ? 0 : position_q[n];
  }
  int64_t dense_start_k(int64_t n) const {
    return start_k.empty() || position_k.empty() ? 0 : position_k[n];
  }
};

// A '#' starts a comment. Every error names the token, the rule and what would work; whether the
// problem itself is legal is validate()'s to say.
Result<Case> parse_case(std::string_view text);

// The rules that join several keys; parse_case asks it.
Status check_case(const Case& c);

// The canonical line: parse_case(to_text(c)) == c.
std::string to_text(const Case& c);

// The scalar keywords that ask a front end for the case whose problem this is, as members of an object.
void tell_keywords(const Case& c, const Problem& problem, JsonWriter& json);

// The geometry of a parsed case. Allocates no tensors, and lists only of numbers that differ.
CaseGeometry geometry_of(const Case& c);

// Buffers with the scalars of a case, and nothing else.
Buffers scalars_of(const CaseGeometry& geometry);

}  // namespace tessera
