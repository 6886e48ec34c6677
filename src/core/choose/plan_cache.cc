// SPDX-License-Identifier: Apache-2.0
#include "core/choose/plan_cache.h"

#include "core/log.h"

namespace tessera {
namespace {

size_t hash_of_key(const Backend* backend, const Problem& problem, const Device& device) {
  const auto device_bits = (static_cast<uint64_t>(device.kind) << 48) ^
                           (static_cast<uint64_t>(device.ordinal) << 16) ^
                           static_cast<uint64_t>(device.arch);
  return hash_of(problem) ^ device_bits ^ reinterpret_cast<uintptr_t>(backend);
}

bool same_device(const Device& a, const Device& b) {
  return a.kind == b.kind && a.ordinal == b.ordinal && a.arch == b.arch;
}

}  // namespace

Result<std::shared_ptr<const Planned>> PlanCache::find(const Problem& problem,
                                                       const Device& device) {
  const size_t hash = hash_of_key(nullptr, problem, device);
  const auto matches = [&](const Key& key) {
    return same_device(key.device, device) && same(key.problem, problem);
  };
  {
    const std::lock_guard lock(mutex_);
    if (const auto* known = problems_.find(hash, matches)) {
      if ((*known)->plan) return *known;
      return (*known)->refusal;
    }
  }

  TESSERA_RETURN_IF_ERROR(validate(problem));
  Result<Problem> forced = with_forced_backend(backends_, normalised(problem));
  if (!forced.ok()) return forced.status();
  auto planned = std::make_shared<Planned>();
  planned->problem = forced.value();
  TESSERA_RETURN_IF_ERROR(plan_first(*planned, device));
  const std::lock_guard lock(mutex_);
  if (!problems_.find(hash, matches)) problems_.insert(hash, {nullptr, problem, device}, planned);
  if (!planned->plan) return planned->refusal;
  return std::shared_ptr<const Planned>(std::move(planned));
}

Status PlanCache::plan_first(Planned& planned, const Device& device) {
  std::vector<Refusal> refused;
  for (;;) {
    const Result<const Backend*> chosen = choose(backends_, planned.problem, device, refused);
    if (!chosen.ok()) {
      planned.refusal = chosen.status();
      return {};
    }
    const Backend& backend = *chosen.value();
    Result<std::shared_ptr<const Plan>> plan = plan_of(backend, planned.problem, device);
    if (plan.ok()) {
      planned.backend = &backend;
      planned.plan = std::move(plan).value();
      if (!log_enabled(Topic::kPlan)) return {};
      const std::string kernels = backend.kernels_for(planned.problem, device);
      log(Topic::kPlan, "%.*s%s%s runs %s", static_cast<int>(backend.name().size()),
          backend.name().data(), kernels.empty() ? "" : " by ", kernels.c_str(),
          to_case(planned.problem).c_str());
      return {};
    }
    if (plan.status().code() != TESSERA_REFUSED) return plan.status();
    log(Topic::kPlan, "%.*s has no plan: %s", static_cast<int>(backend.name().size()),
        backend.name().data(), plan.status().message().c_str());
    refused.push_back({&backend, plan.status().message()});
  }
}

Result<std::shared_ptr<const Plan>> PlanCache::plan_of(const Backend& backend,
                                                       const Problem& problem,
                                                       const Device& device) {
  const Problem canonical = backend.canonical(problem);
  const size_t hash = hash_of_key(&backend, canonical, device);
  const auto matches = [&](const Key& key) {
    return key.backend == &backend && same_device(key.device, device) &&
           same(key.problem, canonical);
  };
  {
    const std::lock_guard lock(mutex_);
    if (const auto* known = plans_.find(hash, matches)) return *known;
  }
  Result<std::unique_ptr<Plan>> built = backend.plan(canonical, device);
  if (!built.ok()) return built.status();
  log(Topic::kPlan, "%.*s built a plan", static_cast<int>(backend.name().size()),
      backend.name().data());
  const std::lock_guard lock(mutex_);
  if (const auto* known = plans_.find(hash, matches)) return *known;
  std::shared_ptr<const Plan> plan = std::move(built).value();
  plans_.insert(hash, {&backend, canonical, device}, plan);
  return plan;
}

size_t PlanCache::problem_count() const {
  const std::lock_guard lock(mutex_);
  return problems_.size();
}

size_t PlanCache::plan_count() const {
  const std::lock_guard lock(mutex_);
  return plans_.size();
}

}  // namespace tessera
