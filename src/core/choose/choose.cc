// SPDX-License-Identifier: Apache-2.0
#include "core/choose/choose.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/environment.h"
#include "core/log.h"

namespace tessera {
namespace {

// A refusal has to fit in tessera_error.message with its last line.
constexpr size_t kListBytes = 1500;

bool is_of_device(const Reason& reason) { return reason.id == ReasonId::kDevice; }

// Why a backend does not run it, on one line; of one for another device, only that.
std::string line_of(std::span<const Reason> reasons) {
  const bool is_elsewhere = std::any_of(reasons.begin(), reasons.end(), is_of_device);
  std::string text;
  for (const Reason& reason : reasons) {
    if (is_elsewhere && !is_of_device(reason)) continue;
    text += (text.empty() ? "" : ";  ") + reason.text;
  }
  return text;
}

const Refusal* find_refusal(std::span<const Refusal> refused, const Backend* backend) {
  for (const Refusal& refusal : refused) {
    if (refusal.backend == backend) return &refusal;
  }
  return nullptr;
}

// A line for each backend, or for several that say the same; first those of the device.
std::string refusal(BackendList backends, const Problem& problem, const Device& device,
                    std::span<const Refusal> refused) {
  std::vector<std::pair<std::string, std::string>> here, elsewhere;  // names, what they say
  for (const Backend* backend : backends) {
    std::vector<Reason> reasons = reasons_of(*backend, problem, device);
    if (const Refusal* of_plan = find_refusal(refused, backend)) {
      reasons.push_back({ReasonId::kPlan, Remedy::kNone, of_plan->text});
    }
    auto& lines = std::any_of(reasons.begin(), reasons.end(), is_of_device) ? elsewhere : here;
    std::string line = line_of(reasons);
    const std::string name(backend->name());
    if (!lines.empty() && lines.back().second == line) {
      lines.back().first += ", " + name;
    } else {
      lines.emplace_back(name, std::move(line));
    }
  }
  std::string text = "no backend supports this problem";
  for (const auto* lines : {&here, &elsewhere}) {
    for (const auto& [names, line] : *lines) text += "\n  " + names + ": " + line;
  }
  if (text.size() > kListBytes) text = text.substr(0, kListBytes) + " ...";
  text += "\nrepro: python -m tessera explain \"" + to_case(problem) + "\"";
  if (device.arch > 0) text += " --device " + device_text(device);
  return text;
}

}  // namespace

std::string_view forced_backend(const Problem& problem) {
  return {problem.backend, strnlen(problem.backend, sizeof problem.backend)};
}

Result<Problem> with_forced_backend(BackendList backends, const Problem& problem) {
  TESSERA_RETURN_IF_ERROR(check_log());
  for (const Backend* backend : backends) TESSERA_RETURN_IF_ERROR(backend->check_environment());
  std::string_view name = forced_backend(problem);
  const bool by_environment = name.empty();
  if (by_environment) name = environment().backend;
  if (name.empty()) return problem;
  std::string names;
  for (const Backend* backend : backends) {
    if (backend->name() == name) {
      Problem forced = problem;
      name.copy(forced.backend, sizeof forced.backend);
      return forced;
    }
    names += (names.empty() ? "" : ", ") + std::string(backend->name());
  }
  return invalid("%s=\"%s\": must be one of %s; leave it out to let the library choose",
                 by_environment ? "TESSERA_BACKEND" : "backend", printable(name).c_str(),
                 names.c_str());
}

Result<Device> import_device(const tessera_device* caller) {
  if (!caller) return invalid("device=NULL: must point to a tessera_device; {0} is the CPU");
  if (caller->kind != TESSERA_CPU && caller->kind != TESSERA_CUDA) {
    return invalid("device.kind=%d: must be TESSERA_CPU (0) or TESSERA_CUDA (1)", caller->kind);
  }
  if (caller->ordinal < 0 || caller->arch < 0 || caller->reserved != 0) {
    return invalid("device.ordinal=%d, arch=%d, reserved=%d: must not be negative, and reserved 0",
                   caller->ordinal, caller->arch, caller->reserved);
  }
  if (caller->kind == TESSERA_CPU) return Device{};
  return *caller;
}

Result<const Backend*> choose(BackendList backends, const Problem& problem, const Device& device,
                              std::span<const Refusal> refused) {
  const std::string_view forced = forced_backend(problem);
  const Backend* chosen = nullptr;
  std::vector<const Backend*> slower;
  for (const Backend* backend : backends) {
    if (!forced.empty() && backend->name() != forced) continue;
    if (find_refusal(refused, backend) || !backend->supports(problem, device)) continue;
    if (forced.empty() && !backend->yields(problem, device).empty()) {
      slower.push_back(backend);
    } else if (backend->unavailable().empty()) {
      chosen = backend;
      break;
    }
  }
  for (size_t i = 0; !chosen && i < slower.size(); ++i) {
    if (slower[i]->unavailable().empty()) chosen = slower[i];
  }
  if (chosen) {
    if (log_enabled(Topic::kDispatch)) {
      log(Topic::kDispatch, "%.*s runs %s", static_cast<int>(chosen->name().size()),
          chosen->name().data(), to_case(problem).c_str());
    }
    return chosen;
  }
  Status status(TESSERA_REFUSED, refusal(backends, problem, device, refused));
  log(Topic::kDispatch, "%s", status.message().c_str());
  return status;
}

std::vector<Reason> reasons_of(const Backend& backend, const Problem& problem, const Device& device,
                               bool imagined) {
  std::vector<Reason> all;
  const std::string_view forced = forced_backend(problem);
  if (!forced.empty() && backend.name() != forced) {
    all.push_back({ReasonId::kByNameOnly, Remedy::kDropForcedBackend,
                   "backend=\"" + std::string(forced) + "\" is forced; leave it unset"});
  }
  const Support support = backend.supports(problem, device);
  // Without its driver a backend is no further away from tensors on the host than with it.
  const bool moot =
      std::any_of(support.reasons().begin(), support.reasons().end(), [&](const Reason& r) {
        return r.id == ReasonId::kNotBuilt ||
               (r.id == ReasonId::kDevice && device.kind == TESSERA_CPU);
      });
  // A library is opened for a problem that would run, and for no other.
  const bool not_needed =
      backend.opens_library() &&
      (!all.empty() || !support || (forced.empty() && !backend.yields(problem, device).empty()));
  if (!moot && !imagined && !not_needed) {
    std::string why = backend.unavailable();
    if (!why.empty()) all.push_back({ReasonId::kNotLoaded, Remedy::kDeviceCpu, std::move(why)});
  }
  for (const Reason& reason : support.reasons()) {
    if (!imagined || reason.id != ReasonId::kNotBuilt) all.push_back(reason);
  }
  return all;
}

Answer answer_of(const Backend& backend, const Problem& problem, const Device& device,
                 bool imagined) {
  Answer answer{reasons_of(backend, problem, device, imagined), {}, {}};
  const bool could =
      std::all_of(answer.reasons.begin(), answer.reasons.end(), [](const Reason& reason) {
        return reason.id == ReasonId::kNotBuilt || reason.id == ReasonId::kNotLoaded;
      });
  if (!could) return answer;
  if (forced_backend(problem).empty()) answer.yields = backend.yields(problem, device);
  answer.kernels = backend.kernels_for(problem, device);
  return answer;
}

int first_of(std::span<const Answer> answers) {
  int first = -1;
  for (size_t i = 0; i < answers.size(); ++i) {
    if (!answers[i].reasons.empty()) continue;
    if (answers[i].yields.empty()) return static_cast<int>(i);
    if (first < 0) first = static_cast<int>(i);
  }
  return first;
}

Result<const Backend*> choose_utilities(BackendList backends, const Device& device) {
  std::string text = "no backend of this machine computes it on " + device_text(device);
  for (const Backend* backend : backends) {
    const bool owns = backend->owns_utilities(device);
    std::string why;
    if (owns || (device.kind != TESSERA_CPU && !backend->opens_library())) {
      why = backend->unavailable();
    }
    if (owns && why.empty()) return backend;
    text += "\n  " + std::string(backend->name()) + ": " +
            (why.empty() ? "does not own merge and dropout_mask there" : why);
  }
  return Status(TESSERA_REFUSED, text);
}

std::string device_text(const Device& device) {
  if (device.kind == TESSERA_CPU) return "cpu";
  return device.arch > 0 ? "sm" + std::to_string(device.arch) : "cuda";
}

}  // namespace tessera
