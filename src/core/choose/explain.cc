// SPDX-License-Identifier: Apache-2.0
#include "core/choose/explain.h"

#include <algorithm>
#include <cstring>

#include "core/choose/workspace.h"
#include "core/json.h"

namespace tessera {
namespace {

// The question that a remedy edits.
struct Question {
  Problem problem;
  Device device;
};

std::vector<Answer> answers_of(BackendList backends, const Question& question) {
  std::vector<Answer> answers;
  for (const Backend* backend : backends) {
    answers.push_back(
        answer_of(*backend, question.problem, question.device, is_imagined(question.device)));
  }
  return answers;
}

// Answers as choose() does, for devices that may only be imagined.
const Backend* first_supporting(BackendList backends, const Question& question) {
  const int first = first_of(answers_of(backends, question));
  return first < 0 ? nullptr : backends[static_cast<size_t>(first)];
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

// Which answer is the first to run it, -1 for none, and the workspace that it takes.
struct First {
  int index;
  std::optional<int64_t> workspace_bytes;
};

// Plans as the plan cache does; a plan() that refuses is one more reason.
First plan_first(BackendList backends, const Question& question, std::vector<Answer>& answers) {
  for (;;) {
    const int first = first_of(answers);
    if (first < 0) return {first, {}};
    const Backend& backend = *backends[static_cast<size_t>(first)];
    const auto plan = backend.plan(backend.canonical(question.problem), question.device);
    if (plan.ok()) {
      const Result<int64_t> bytes = workspace_bytes_of(*plan.value(), question.problem, 0);
      return {first, bytes.ok() ? std::optional(bytes.value()) : std::nullopt};
    }
    // No plan can be tried for a device that is not here: its rules are all that is known.
    if (is_imagined(question.device) || plan.status().code() != TESSERA_REFUSED) return {first, {}};
    answers[static_cast<size_t>(first)].reasons.push_back(
        {ReasonId::kPlan, Remedy::kNone, plan.status().message()});
  }
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

namespace {

// Text, or null where it is empty.
void write_text(JsonWriter& json, std::string_view text) {
  text.empty() ? json.null() : json.string(text);
}

// One entry of "backends".
void write_backend(JsonWriter& json, const Backend& backend, const Answer& answer, bool imagined) {
  json.begin_object();
  json.key("name").string(backend.name());
  const bool lacks =
      std::any_of(answer.reasons.begin(), answer.reasons.end(),
                  [](const Reason& reason) { return reason.id == ReasonId::kNotLoaded; });
  json.key("available");
  backend.opens_library() && !lacks &&
          (imagined || !answer.reasons.empty() || !answer.yields.empty())
      ? json.null()
      : json.boolean(!lacks && backend.unavailable().empty());
  json.key("built").boolean(backend.is_built());
  json.key("supported").boolean(answer.reasons.empty());
  json.key("yields");
  write_text(json, answer.yields);
  json.key("kernel");
  write_text(json, answer.kernels);
  json.key("reasons").begin_array();
  for (const Reason& reason : answer.reasons) {
    json.begin_object().key("id").string(reason_name(reason.id));
    json.key("text").string(reason.text).end_object();
  }
  json.end_array().end_object();
}

void write_suggestion(JsonWriter& json, const Suggestion& suggestion) {
  json.begin_object();
  json.key("text").string(suggestion.text);
  json.key("case").string(to_case(suggestion.problem));
  json.key("device").string(device_text(suggestion.device));
  json.key("backend").string(suggestion.backend->name());
  json.end_object();
}

}  // namespace

std::string explain_json(BackendList backends, const Problem& problem, const Device& device,
                         const std::string& case_text) {
  const Question question{problem, device};
  std::vector<Answer> answers = answers_of(backends, question);
  const auto [first, workspace] = plan_first(backends, question, answers);
  const Backend* chosen = first < 0 ? nullptr : backends[static_cast<size_t>(first)];
  JsonWriter json;
  json.begin_object();
  json.key("case").string(case_text);
  json.key("device").string(device_text(device));
  json.key("backend");
  write_text(json, chosen ? chosen->name() : "");
  json.key("kernel");
  write_text(json, chosen ? std::string_view(answers[static_cast<size_t>(first)].kernels) : "");
  json.key("workspace_bytes");
  workspace ? json.number(*workspace) : json.null();
  json.key("reasons").begin_object();
  for (size_t i = 0; i < backends.size(); ++i) {
    json.key(backends[i]->name()).begin_array();
    for (const Reason& reason : answers[i].reasons) json.string(reason.text);
    json.end_array();
  }
  json.end_object();
  json.key("backends").begin_array();
  for (size_t i = 0; i < backends.size(); ++i) {
    write_backend(json, *backends[i], answers[i], is_imagined(device));
  }
  json.end_array();
  json.key("suggestion");
  if (const auto suggestion = suggest(backends, problem, device)) {
    write_suggestion(json, *suggestion);
  } else {
    json.null();
  }
  return std::move(json.end_object()).take();
}

}  // namespace tessera
