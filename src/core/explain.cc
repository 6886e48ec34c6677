// SPDX-License-Identifier: Apache-2.0
#include "core/explain.h"

#include <algorithm>
#include <cstring>

#include "core/json.h"

namespace tessera {
namespace {

// The question that a remedy edits.
struct Question {
  Problem problem;
  Device device;
};

// As choose(), for devices that may only be imagined.
const Backend* first_supporting(BackendList backends, const Question& question) {
  for (const Backend* backend : backends) {
    if (reasons_of(*backend, question.problem, question.device, is_imagined(question.device))
            .empty()) {
      return backend;
    }
  }
  return nullptr;
}

void force(Problem& problem, std::string_view name) {
  std::memset(problem.backend, 0, sizeof problem.backend);
  name.copy(problem.backend, sizeof problem.backend - 1);
}

// q, k, v and all that follows their dtype.
void convert(Problem& p, int32_t to) {
  const int32_t from = p.tensor[TESSERA_Q].dtype;
  for (const int i : {TESSERA_Q, TESSERA_K, TESSERA_V, TESSERA_O, TESSERA_DO, TESSERA_DQ,
                      TESSERA_DK, TESSERA_DV}) {
    if (given(p, i)) p.tensor[i].dtype = to;
  }
  for (const int i : {TESSERA_BIAS, TESSERA_SINK, TESSERA_ALIBI_SLOPES, TESSERA_DBIAS,
                      TESSERA_DSINK, TESSERA_DALIBI_SLOPES}) {
    if (given(p, i) && p.tensor[i].dtype == from) p.tensor[i].dtype = to;
  }
  for (const int i : {TESSERA_LSE, TESSERA_DLSE, TESSERA_MAX_LOGIT}) {
    if (given(p, i)) p.tensor[i].dtype = TESSERA_FP32;
  }
  for (const int i : {TESSERA_K_SCALE, TESSERA_V_SCALE}) p.tensor[i] = Tensor{};
}

// Edits the question and says how, "" when there is nothing to do.
std::string apply(Remedy remedy, const Backend& backend, Question& question) {
  Problem& p = question.problem;
  switch (remedy) {
    case Remedy::kNone:
      return {};
    case Remedy::kUseFp32:
      convert(p, TESSERA_FP32);
      return "convert q, k and v to fp32";
    case Remedy::kUseBf16:
      convert(p, TESSERA_BF16);
      return "convert q, k and v to bf16";
    case Remedy::kDeviceCpu:
      if (question.device.kind == TESSERA_CPU) return {};
      question.device = Device{};
      return "move the tensors to the CPU";
    case Remedy::kForceThisBackend:
      force(p, backend.name());
      return "pass backend=\"" + std::string(backend.name()) + "\"";
    case Remedy::kDropForcedBackend:
      force(p, "");
      return "leave backend unset";
    case Remedy::kAllowQuadratic:
      p.flags |= TESSERA_ALLOW_QUADRATIC;
      return "pass allow_quadratic=True";
  }
  return {};
}

// The question with these remedies of a backend applied, if some backend then runs it.
std::optional<Suggestion> attempt(BackendList backends, const Backend& backend,
                                  std::span<const Remedy> remedies, const Question& question) {
  Question edited = question;
  std::string text;
  for (const Remedy remedy : remedies) {
    const std::string edit = apply(remedy, backend, edited);
    if (edit.empty()) continue;
    text += (text.empty() ? "" : ", and ") + edit;
  }
  if (text.empty() || !validate(edited.problem).ok()) return {};
  edited.problem = normalised(edited.problem);
  const Backend* helped = first_supporting(backends, edited);
  if (!helped) return {};
  force(edited.problem, helped->name());
  return Suggestion{text, edited.problem, edited.device, helped};
}

std::vector<Remedy> distinct_remedies(std::span<const Reason> reasons) {
  std::vector<Remedy> remedies;
  for (const Reason& reason : reasons) {
    if (reason.remedy == Remedy::kNone) continue;
    if (std::find(remedies.begin(), remedies.end(), reason.remedy) == remedies.end()) {
      remedies.push_back(reason.remedy);
    }
  }
  return remedies;
}

std::optional<int64_t> workspace_of(const Backend& backend, const Question& question) {
  auto plan = backend.plan(backend.canonical(question.problem), question.device);
  if (!plan.ok()) return {};
  return plan.value()->workspace_bytes(question.problem, 0);
}

}  // namespace

bool is_imagined(const Device& device) { return device.kind != TESSERA_CPU && device.arch > 0; }

std::optional<Suggestion> suggest(BackendList backends, const Problem& problem,
                                  const Device& device) {
  const Question question{problem, device};
  if (first_supporting(backends, question)) return {};
  // One edit is nearer than all of a backend's, and an earlier backend is preferred.
  for (const bool together : {false, true}) {
    for (const Backend* backend : backends) {
      const std::vector<Remedy> remedies =
          distinct_remedies(reasons_of(*backend, problem, device, is_imagined(device)));
      const size_t step = together ? std::max<size_t>(remedies.size(), 1) : 1;
      for (size_t i = 0; i + step <= remedies.size(); ++i) {
        auto found = attempt(backends, *backend, std::span(remedies).subspan(i, step), question);
        if (found) return found;
      }
    }
  }
  return {};
}

std::string explain_json(BackendList backends, const Problem& problem, const Device& device,
                         const std::string& case_text) {
  const Question question{problem, device};
  const Backend* chosen = first_supporting(backends, question);
  JsonWriter json;
  json.begin_object();
  json.key("case").string(case_text);
  json.key("device").string(device_text(device));
  json.key("backend");
  chosen ? json.string(chosen->name()) : json.null();
  const auto workspace = chosen ? workspace_of(*chosen, question) : std::nullopt;
  json.key("workspace_bytes");
  workspace ? json.number(*workspace) : json.null();

  std::vector<std::vector<Reason>> reasons;
  for (const Backend* backend : backends) {
    reasons.push_back(reasons_of(*backend, problem, device, is_imagined(device)));
  }
  json.key("reasons").begin_object();
  for (size_t i = 0; i < backends.size(); ++i) {
    json.key(backends[i]->name()).begin_array();
    for (const Reason& reason : reasons[i]) json.string(reason.text);
    json.end_array();
  }
  json.end_object();
  json.key("backends").begin_array();
  for (size_t i = 0; i < backends.size(); ++i) {
    json.begin_object();
    json.key("name").string(backends[i]->name());
    json.key("available").boolean(backends[i]->unavailable().empty());
    json.key("supported").boolean(reasons[i].empty());
    json.key("reasons").begin_array();
    for (const Reason& reason : reasons[i]) {
      json.begin_object().key("id").string(reason_name(reason.id));
      json.key("text").string(reason.text).end_object();
    }
    json.end_array().end_object();
  }
  json.end_array();

  json.key("suggestion");
  if (const auto suggestion = suggest(backends, problem, device)) {
    json.begin_object();
    json.key("text").string(suggestion->text);
    json.key("case").string(to_case(suggestion->problem));
    json.key("device").string(device_text(suggestion->device));
    json.key("backend").string(suggestion->backend->name());
    json.end_object();
  } else {
    json.null();
  }
  return std::move(json.end_object()).take();
}

}  // namespace tessera
