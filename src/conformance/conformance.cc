// SPDX-License-Identifier: Apache-2.0
#include "conformance/conformance.h"

#include <charconv>
#include <cmath>
#include <cstring>

#include "conformance/conformance_case.h"
#include "core/json.h"

// The C name of a ConformanceCase.
struct tessera_case {
  std::unique_ptr<tessera::ConformanceCase> of;
};

namespace tessera {
namespace {

int32_t report_error(const Status& status, tessera_error* error) {
  if (error && error->struct_size >= sizeof(tessera_error)) {
    error->code = status.code();
    const size_t bytes = std::min(status.message().size(), sizeof error->message - 1);
    std::memcpy(error->message, status.message().data(), bytes);
    error->message[bytes] = '\0';
  }
  return status.code();
}

int64_t copy_out(const std::string& text, char* buffer, int64_t capacity) {
  const auto needed = static_cast<int64_t>(text.size()) + 1;
  if (buffer && capacity > 0) {
    const int64_t bytes = std::min(needed, capacity) - 1;
    std::memcpy(buffer, text.data(), static_cast<size_t>(bytes));
    buffer[bytes] = '\0';
  }
  return needed;
}

void real(JsonWriter& json, std::string_view key, double value) {
  json.key(key);
  if (!std::isfinite(value)) {
    json.null();
    return;
  }
  char text[40];
  json.raw({text, std::to_chars(text, text + sizeof text, value).ptr});
}

void tensors(JsonWriter& json, const CaseGeometry& g) {
  const Problem& p = g.problem;
  json.key("tensors").begin_object();
  for (int index = 0; index < TESSERA_NUM_TENSORS; ++index) {
    const bool second = index == TESSERA_SEGMENT_IDS_K || index == TESSERA_PAGE_TABLE_V;
    const Role role = tensor_rule(index).role;
    const bool scale = role == Role::kBackwardInput && index > TESSERA_DALIBI_SLOPES;
    if (!given(p, index) || second || (role != Role::kInput && !scale)) continue;
    std::string_view keyword = tensor_rule(index).name;
    if (index == TESSERA_MASK) keyword = has(p, TESSERA_MASK_DROP) ? "drop" : "keep";
    if (index == TESSERA_SEGMENT_IDS_Q) keyword = "segment_ids";
    if (index == TESSERA_PAGE_TABLE_K) keyword = "page_table";
    json.key(keyword);
    const bool pair =
        index == TESSERA_SEGMENT_IDS_Q || (index == TESSERA_PAGE_TABLE_K && given(p, index + 1));
    if (pair)
      json.begin_array().number(index).number(index + 1).end_array();
    else
      json.number(index);
  }
  json.end_object();
  json.key("same").begin_array();
  for (int index : {TESSERA_SEQLENS_Q, TESSERA_CU_SEQLENS_Q, TESSERA_CU_SEQLENS_Q_PADDED}) {
    if (!given(p, index) || !given(p, index + 1) || g.owner[index + 1] != index) continue;
    json.begin_array()
        .string(tensor_rule(index).name)
        .string(tensor_rule(index + 1).name)
        .end_array();
  }
  json.end_array();
}

// Order of axes in the caller's array: the format's, without a packed side's leading 1, and without
// what a lower-rank argument does not have.
void axes(JsonWriter& json, const Problem& p) {
  json.key("axes").begin_object();
  for (int index = 0; index < TESSERA_NUM_TENSORS; ++index) {
    if (!given(p, index)) continue;
    const bool query =
        index == TESSERA_Q || index == TESSERA_O || index == TESSERA_DO || index == TESSERA_DQ;
    const bool key =
        index == TESSERA_K || index == TESSERA_V || index == TESSERA_DK || index == TESSERA_DV;
    const int32_t format = query ? p.format_q : key && !is_paged(p) ? p.format_kv : TESSERA_BSHD;
    const bool statistic = index == TESSERA_LSE || index == TESSERA_DLSE;
    const bool is_scale = index == TESSERA_K_SCALE || index == TESSERA_V_SCALE ||
                          index == TESSERA_Q_SCALE || index == TESSERA_DO_SCALE;
    bool drop_first = false;
    if (query || statistic || index == TESSERA_KEY_RANGES || index == TESSERA_SEGMENT_IDS_Q)
      drop_first = is_thd_q(p);
    if (key || index == TESSERA_SEGMENT_IDS_K) drop_first = is_thd_k(p);
    if (index == TESSERA_ALIBI_SLOPES || index == TESSERA_DALIBI_SLOPES || is_scale) {
      drop_first = p.tensor[index].extent[0] == 1 && !(is_scale && p.tensor[index].extent[2] > 1);
    }
    const int rank = tensor_rule(index).rank - (is_scale && p.tensor[index].extent[2] == 1 ? 1 : 0);
    drop_first |= index >= TESSERA_AMAX_O && index <= TESSERA_AMAX_DV;
    int order[4] = {0, 1, 2, 3};
    if (format == TESSERA_SBHD) std::swap(order[0], order[1]);
    if (format == TESSERA_BHSD) std::swap(order[1], order[2]);
    json.key(std::to_string(index)).begin_array();
    for (int axis = drop_first ? 1 : 0; axis < rank; ++axis) json.number(order[axis]);
    json.end_array();
  }
  json.end_object();
}

std::string arguments_json(const ConformanceCase& of) {
  const Case& c = of.spec();
  const Problem& p = of.problem();
  JsonWriter json;
  json.begin_object();
  json.key("case").string(to_text(c));
  json.key("pass").string(is_backward(p) ? "bwd" : "fwd");
  json.key("dtype").string(dtype_name(c.dtype));
  json.key("kwargs").begin_object();
  tell_keywords(c, p, json);
  json.end_object();
  tensors(json, of.geometry());
  const auto group = [&](const char* name, std::initializer_list<int> indices) {
    json.key(name).begin_object();
    for (int index : indices) {
      if (given(p, index)) json.key(tensor_rule(index).name).number(index);
    }
    json.end_object();
  };
  if (is_backward(p)) {
    group("backward", {TESSERA_DO, TESSERA_O, TESSERA_LSE, TESSERA_DLSE});
    group("outputs", {TESSERA_DQ, TESSERA_DK, TESSERA_DV, TESSERA_DBIAS, TESSERA_DSINK,
                      TESSERA_DALIBI_SLOPES, TESSERA_AMAX_DQ, TESSERA_AMAX_DK, TESSERA_AMAX_DV});
    json.key("grads").begin_array();
    for (int index = TESSERA_DQ; index <= TESSERA_DALIBI_SLOPES; ++index) {
      if (given(p, index)) json.string(tensor_rule(index).name);
    }
    json.end_array();
  } else {
    group("outputs", {TESSERA_O, TESSERA_LSE, TESSERA_MAX_LOGIT, TESSERA_AMAX_O});
  }
  json.key("out").boolean(c.out || c.has(TESSERA_ACCUMULATE));
  axes(json, p);
  json.end_object();
  return std::move(json).take();
}

std::string report_json(const CaseReport& report) {
  JsonWriter json;
  json.begin_object();
  json.key("passed").boolean(report.passed());
  json.key("refused").boolean(report.refused);
  json.key("outputs").begin_object();
  for (const OutputReport& output : report.outputs) {
    const Comparison& c = output.comparison;
    json.key(tensor_rule(output.index).name).begin_object();
    real(json, "max_err", c.max_err);
    real(json, "max_limit", c.max_limit);
    real(json, "mean_err", c.mean_err);
    real(json, "mean_limit", c.mean_limit);
    json.key("ok").boolean(c.ok());
    json.end_object();
  }
  json.end_object();
  json.key("failures").begin_array();
  for (const std::string& failure : report.failures) json.string(failure);
  json.end_array();
  json.end_object();
  return std::move(json).take();
}

// No exception leaves through the C door.
template <typename Body>
auto guarded(tessera_error* error, Body&& body) -> decltype(body()) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    report_error(Status(TESSERA_OUT_OF_MEMORY, "case: host memory ran out"), error);
  } catch (const std::exception& e) {
    report_error(Status(TESSERA_FAILED, e.what()), error);
  }
  return {};
}

}  // namespace
}  // namespace tessera

using namespace tessera;

tessera_case* tessera_case_new(const char* text, tessera_error* error) {
  return guarded(error, [&]() -> tessera_case* {
    auto made = ConformanceCase::create(text ? text : "");
    report_error(made.status(), error);
    return made.ok() ? new tessera_case{std::move(made).value()} : nullptr;
  });
}

int32_t tessera_case_describe(const char* text, tessera_problem* problem, tessera_buffers* buffers,
                              tessera_error* error) {
  int32_t code = TESSERA_FAILED;
  guarded(error, [&] {
    const Result<Case> parsed = parse_case(text ? text : "");
    code = report_error(parsed.status(), error);
    if (!parsed.ok()) return code;
    const CaseGeometry geometry = geometry_of(parsed.value());
    *problem = geometry.problem;
    *buffers = scalars_of(geometry);
    return code;
  });
  return code;
}

void tessera_case_free(tessera_case* c) { delete c; }
const tessera_problem* tessera_case_problem(const tessera_case* c) { return &c->of->problem(); }
tessera_buffers* tessera_case_buffers(tessera_case* c) { return &c->of->buffers(); }
void tessera_case_poison_outputs(tessera_case* c) { c->of->poison_outputs(); }

int64_t tessera_case_json(const tessera_case* c, char* buffer, int64_t capacity) {
  return guarded(nullptr, [&] { return copy_out(arguments_json(*c->of), buffer, capacity); });
}

int32_t tessera_case_run(tessera_case* c, const char* backend, const tessera_device* device,
                         int32_t num_threads, tessera_error* error) {
  int32_t code = TESSERA_FAILED;
  guarded(error, [&] {
    return code = report_error(c->of->run(backend ? backend : "", *device, num_threads), error);
  });
  return code;
}

int64_t tessera_case_compare(tessera_case* c, char* buffer, int64_t capacity) {
  return guarded(nullptr,
                 [&] { return copy_out(report_json(c->of->compare()), buffer, capacity); });
}
