// SPDX-License-Identifier: Apache-2.0
#include "core/cache/append.h"

#include <algorithm>
#include <cinttypes>
#include <cmath>

#include "core/cache/lost.h"
#include "core/cache/operand.h"
#include "core/count.h"
#include "core/problem/import.h"

namespace tessera {
namespace {

constexpr int64_t kFree = OperandAxis::kFree;

struct Row {
  const char* name;
  int rank;
  bool output;
};
constexpr Row kRows[] = {
    {"k", 4, false},          {"v", 4, false},         {"k_cache", 4, true},
    {"v_cache", 4, true},     {"seqlens_k", 1, false}, {"cu_seqlens", 1, false},
    {"page_table", 2, false}, {"k_scale", 2, false},   {"v_scale", 2, false},
    {"cos", 2, false},        {"sin", 2, false},       {"q", 4, false},
    {"q_out", 4, true},       {"seqlens_q", 1, false},
};

Operand operand(const AppendArgs& args, int index) {
  const Row& row = kRows[index];
  return {row.name, &args.tensor[index], args.data[index], row.rank, row.output};
}

bool given(const AppendArgs& args, int index) { return args.tensor[index].dtype != TESSERA_NONE; }

// Whether every sequence has the same of these tensors: one memory that is expanded, or none.
bool same_for_all(const AppendArgs& args, std::initializer_list<int> tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [&](int index) {
    return !given(args, index) || distinct(args.tensor[index], 0) <= 1;
  });
}

// ---- what goes with what ----

Status check_pair(const AppendArgs& args, int one, int other) {
  if (given(args, one) == given(args, other)) return {};
  const int missing = given(args, one) ? other : one;
  return invalid("%s: not given beside %s; give both or neither", kRows[missing].name,
                 kRows[given(args, one) ? one : other].name);
}

Status check_presence(const AppendArgs& args) {
  if (args.format < TESSERA_BSHD || args.format > TESSERA_THD) {
    return invalid("layout=%d: must be bshd (0), sbhd (1), bhsd (2) or thd (3)", args.format);
  }
  for (const int index : {TESSERA_APPEND_K, TESSERA_APPEND_K_CACHE, TESSERA_APPEND_SEQLENS}) {
    if (!given(args, index)) return invalid("%s: must be given", kRows[index].name);
  }
  TESSERA_RETURN_IF_ERROR(check_pair(args, TESSERA_APPEND_V, TESSERA_APPEND_V_CACHE));
  TESSERA_RETURN_IF_ERROR(check_pair(args, TESSERA_APPEND_COS, TESSERA_APPEND_SIN));
  TESSERA_RETURN_IF_ERROR(check_pair(args, TESSERA_APPEND_Q, TESSERA_APPEND_Q_OUT));
  const bool thd = args.format == TESSERA_THD;
  if (thd != given(args, TESSERA_APPEND_CU_SEQLENS)) {
    return invalid(
        "cu_seqlens: must be given with layout=\"thd\", which says where sequences begin, "
        "and with no other layout");
  }
  if (thd && given(args, TESSERA_APPEND_SEQLENS_Q)) {
    return invalid(
        "seqlens_q: belongs to padded layouts; with layout=\"thd\" cu_seqlens says how many "
        "tokens a sequence has");
  }
  if (given(args, TESSERA_APPEND_Q) && !given(args, TESSERA_APPEND_COS)) {
    return invalid("q: is turned only; give rope=(cos, sin), or leave q out");
  }
  return {};
}

// ---- dtypes ----

Status check_integers(const AppendArgs& args, int index) {
  const int32_t dtype = args.tensor[index].dtype;
  if (!given(args, index) || dtype == TESSERA_INT32 ||
      (dtype == TESSERA_INT64 && index != TESSERA_APPEND_PAGE_TABLE)) {
    return {};
  }
  return invalid("%s.dtype=%s: must be %s", kRows[index].name, dtype_name(dtype).data(),
                 index == TESSERA_APPEND_PAGE_TABLE ? "int32" : "int32 or int64");
}

Status check_dtypes(const AppendArgs& args) {
  const int32_t k = args.tensor[TESSERA_APPEND_K].dtype;
  if (k != TESSERA_FP32 && !is_16bit(k)) {
    return invalid("k.dtype=%s: must be fp32, bf16 or fp16", dtype_name(k).data());
  }
  for (const int index : {TESSERA_APPEND_V, TESSERA_APPEND_Q, TESSERA_APPEND_Q_OUT}) {
    const int32_t dtype = args.tensor[index].dtype;
    if (!given(args, index) || dtype == k) continue;
    return invalid("%s.dtype=%s: must be %s, as k", kRows[index].name, dtype_name(dtype).data(),
                   dtype_name(k).data());
  }
  const int32_t cache = args.tensor[TESSERA_APPEND_K_CACHE].dtype;
  if (!is_float(cache) || cache == TESSERA_FP64) {
    return invalid("k_cache.dtype=%s: must be fp32, bf16, fp16, e4m3 or e5m2",
                   dtype_name(cache).data());
  }
  if (given(args, TESSERA_APPEND_V_CACHE) && args.tensor[TESSERA_APPEND_V_CACHE].dtype != cache) {
    return invalid("v_cache.dtype=%s: must be %s, as k_cache",
                   dtype_name(args.tensor[TESSERA_APPEND_V_CACHE].dtype).data(),
                   dtype_name(cache).data());
  }
  for (const int scale : {TESSERA_APPEND_K_SCALE, TESSERA_APPEND_V_SCALE}) {
    const bool has_cache = scale == TESSERA_APPEND_K_SCALE || given(args, TESSERA_APPEND_V);
    if (given(args, scale) != (is_fp8(cache) && has_cache)) {
      return invalid(
          "%s: must be given beside an fp8 cache, fp32 [hk] or [b, hk], and beside no "
          "other; k_cache.dtype=%s",
          kRows[scale].name, dtype_name(cache).data());
    }
    if (given(args, scale) && args.tensor[scale].dtype != TESSERA_FP32) {
      return invalid("%s.dtype=%s: must be fp32", kRows[scale].name,
                     dtype_name(args.tensor[scale].dtype).data());
    }
  }
  TESSERA_RETURN_IF_ERROR(check_integers(args, TESSERA_APPEND_SEQLENS));
  TESSERA_RETURN_IF_ERROR(check_integers(args, TESSERA_APPEND_CU_SEQLENS));
  TESSERA_RETURN_IF_ERROR(check_integers(args, TESSERA_APPEND_SEQLENS_Q));
  return check_integers(args, TESSERA_APPEND_PAGE_TABLE);
}

// ---- shapes ----

Status check_new_tokens(const AppendArgs& args, int64_t b) {
  const Tensor& k = args.tensor[TESSERA_APPEND_K];
  const int64_t batch = args.format == TESSERA_THD ? 1 : b, s = k.extent[1];
  TESSERA_RETURN_IF_ERROR(check_operand(operand(args, TESSERA_APPEND_K),
                                        {{batch, "b"}, {kFree, "s"}, {kFree, "hk"}, {kFree, "dqk"}},
                                        true));
  if (given(args, TESSERA_APPEND_V)) {
    TESSERA_RETURN_IF_ERROR(
        check_operand(operand(args, TESSERA_APPEND_V),
                      {{batch, "b"}, {s, "s"}, {k.extent[2], "hk"}, {kFree, "dv"}}, true));
  }
  if (!given(args, TESSERA_APPEND_Q)) return {};
  const Tensor& q = args.tensor[TESSERA_APPEND_Q];
  TESSERA_RETURN_IF_ERROR(
      check_operand(operand(args, TESSERA_APPEND_Q),
                    {{batch, "b"}, {s, "s"}, {kFree, "hq"}, {k.extent[3], "dqk"}}, true));
  return check_operand(operand(args, TESSERA_APPEND_Q_OUT),
                       {{batch, "b"}, {s, "s"}, {q.extent[2], "hq"}, {k.extent[3], "dqk"}}, true);
}

Status check_caches(const AppendArgs& args, int64_t b) {
  const Tensor &k = args.tensor[TESSERA_APPEND_K], &v = args.tensor[TESSERA_APPEND_V];
  const bool paged = given(args, TESSERA_APPEND_PAGE_TABLE);
  const OperandAxis first{paged ? kFree : b, paged ? "pages" : "b"};
  const char* rows = paged ? "page_size" : "sk";
  TESSERA_RETURN_IF_ERROR(
      check_operand(operand(args, TESSERA_APPEND_K_CACHE),
                    {first, {kFree, rows}, {k.extent[2], "hk"}, {k.extent[3], "dqk"}}, true));
  if (given(args, TESSERA_APPEND_V)) {
    const Tensor& cache = args.tensor[TESSERA_APPEND_K_CACHE];
    TESSERA_RETURN_IF_ERROR(check_operand(operand(args, TESSERA_APPEND_V_CACHE),
                                          {{cache.extent[0], first.name},
                                           {cache.extent[1], rows},
                                           {k.extent[2], "hk"},
                                           {v.extent[3], "dv"}},
                                          true));
  }
  if (!paged) return {};
  if (args.tensor[TESSERA_APPEND_K_CACHE].extent[1] < 1) {
    return invalid("k_cache.shape: page_size=0: must be at least 1");
  }
  return check_operand(operand(args, TESSERA_APPEND_PAGE_TABLE), {{b, "b"}, {kFree, "max_pages"}},
                       false);
}

Status check_shapes(const AppendArgs& args) {
  const int64_t b = args.tensor[TESSERA_APPEND_SEQLENS].extent[0];
  const int64_t hk = args.tensor[TESSERA_APPEND_K].extent[2];
  TESSERA_RETURN_IF_ERROR(
      check_operand(operand(args, TESSERA_APPEND_SEQLENS), {{kFree, "b"}}, false));
  TESSERA_RETURN_IF_ERROR(check_new_tokens(args, b));
  TESSERA_RETURN_IF_ERROR(check_caches(args, b));
  if (given(args, TESSERA_APPEND_CU_SEQLENS)) {
    TESSERA_RETURN_IF_ERROR(
        check_operand(operand(args, TESSERA_APPEND_CU_SEQLENS), {{b + 1, "b + 1"}}, false));
  }
  if (given(args, TESSERA_APPEND_SEQLENS_Q)) {
    TESSERA_RETURN_IF_ERROR(
        check_operand(operand(args, TESSERA_APPEND_SEQLENS_Q), {{b, "b"}}, false));
  }
  for (const int scale : {TESSERA_APPEND_K_SCALE, TESSERA_APPEND_V_SCALE}) {
    if (!given(args, scale)) continue;
    TESSERA_RETURN_IF_ERROR(
        check_operand(operand(args, scale), {{b, "b", true}, {hk, "hk"}}, false));
  }
  if (!given(args, TESSERA_APPEND_COS)) return {};
  return check_tables(operand(args, TESSERA_APPEND_COS), operand(args, TESSERA_APPEND_SIN),
                      args.tensor[TESSERA_APPEND_K].extent[3], "k");
}

// q_out may be q; nothing else that is written may be anything that is read or written.
Status check_overlap(const AppendArgs& args) {
  for (int i = 0; i < static_cast<int>(std::size(kRows)); ++i) {
    if (!kRows[i].output) continue;
    for (int j = 0; j < static_cast<int>(std::size(kRows)); ++j) {
      const bool seen = kRows[j].output && j <= i;
      const bool in_place = i == TESSERA_APPEND_Q_OUT && j == TESSERA_APPEND_Q &&
                            same_place(operand(args, i), operand(args, j));
      if (seen || in_place) continue;
      TESSERA_RETURN_IF_ERROR(check_apart(operand(args, i), operand(args, j)));
    }
  }
  return {};
}

// ---- values ----

Status check_scales(const AppendArgs& args) {
  for (const int index : {TESSERA_APPEND_K_SCALE, TESSERA_APPEND_V_SCALE}) {
    if (!given(args, index)) continue;
    const Tensor& t = args.tensor[index];
    for (int64_t n = 0; n < distinct(t, 0); ++n) {
      for (int64_t h = 0; h < distinct(t, 1); ++h) {
        const double value = load_element(args.data[index], offset_of(t, n, h), t.dtype);
        if (std::isfinite(value) && value > 0) continue;
        return invalid("%s[%" PRId64 ", %" PRId64 "]=%g: must be finite and above 0",
                       kRows[index].name, n, h, value);
      }
    }
  }
  return {};
}

Status check_values(const AppendArgs& args) {
  TESSERA_RETURN_IF_ERROR(check_scales(args));
  const AppendLists lists(args);
  LostTokens lost{};
  for (int64_t item = 0; item < lists.items; ++item) {
    if (breaks(lists, item, &lost)) return refuse(lists, lost);
  }
  return {};
}

}  // namespace

AppendPlaces::AppendPlaces(const AppendArgs& args)
    : args_(args),
      packed_(args.format == TESSERA_THD),
      paged_(given(args, TESSERA_APPEND_PAGE_TABLE)),
      batch_(args.tensor[TESSERA_APPEND_SEQLENS].extent[0]),
      page_size_(args.tensor[TESSERA_APPEND_K_CACHE].extent[1]),
      capacity_(paged_
                    ? (Count{args.tensor[TESSERA_APPEND_PAGE_TABLE].extent[1]} * page_size_).value()
                    : page_size_) {
  const bool lists = same_for_all(args, {TESSERA_APPEND_SEQLENS, TESSERA_APPEND_SEQLENS_Q,
                                         TESSERA_APPEND_CU_SEQLENS, TESSERA_APPEND_PAGE_TABLE});
  const bool rows = paged_ && !given(args, TESSERA_APPEND_Q) &&
                    same_for_all(args, {TESSERA_APPEND_K, TESSERA_APPEND_V, TESSERA_APPEND_K_SCALE,
                                        TESSERA_APPEND_V_SCALE});
  if (lists) distinct_lists_ = std::min<int64_t>(batch_, 1);
  if (lists && rows) distinct_ = std::min<int64_t>(batch_, 1);
}

int64_t AppendPlaces::longest() const {
  int64_t longest = 0;
  for (int64_t n = 0; n < distinct_lists_; ++n) longest = std::max(longest, count(n));
  return longest;
}

int64_t AppendPlaces::count(int64_t n) const {
  const Operand new_tokens = operand(args_, TESSERA_APPEND_SEQLENS_Q);
  if (new_tokens.given()) return integer_at(new_tokens, n);
  if (!packed_) return args_.tensor[TESSERA_APPEND_K].extent[1];
  const Operand cu = operand(args_, TESSERA_APPEND_CU_SEQLENS);
  return integer_at(cu, n + 1) - integer_at(cu, n);
}

int64_t AppendPlaces::first_row(int64_t n) const {
  return packed_ ? integer_at(operand(args_, TESSERA_APPEND_CU_SEQLENS), n) : 0;
}

int64_t AppendPlaces::start(int64_t n) const {
  return integer_at(operand(args_, TESSERA_APPEND_SEQLENS), n);
}

AppendPlaces::Place AppendPlaces::place(int64_t n, int64_t p) const {
  if (!paged_) return {n, p};
  return {integer_at(operand(args_, TESSERA_APPEND_PAGE_TABLE), n, p / page_size_), p % page_size_};
}

Status validate(const AppendArgs& args, const Device& device) {
  TESSERA_RETURN_IF_ERROR(check_fields(args, TESSERA_INTERLEAVED, std::size(kRows),
                                       [](size_t i) { return kRows[i].name; }));
  TESSERA_RETURN_IF_ERROR(check_presence(args));
  TESSERA_RETURN_IF_ERROR(check_dtypes(args));
  TESSERA_RETURN_IF_ERROR(check_shapes(args));
  TESSERA_RETURN_IF_ERROR(check_overlap(args));
  return device.kind == TESSERA_CPU ? check_values(args) : Status();
}

Result<const AppendArgs*> import_append(const tessera_append_args* caller, AppendArgs& storage) {
  if (!caller) return invalid("args=NULL: must point to a tessera_append_args");
  return import_struct(caller, storage, sizeof storage, "append_args");
}

}  // namespace tessera
