// SPDX-License-Identifier: Apache-2.0
#include "core/choose/choose.h"

#include <gtest/gtest.h>

#include <cstring>

#include "core/choose/explain.h"
#include "core/dummy_backend.h"
#include "core/problems.h"

namespace tessera {
namespace {

using testing::DummyBackend;
using testing::forward;

constexpr Device kCpu{};
constexpr Device kHopper{TESSERA_CUDA, 0, 90, 0};

TEST(Choose, TheFirstThatSupports) {
  const DummyBackend a("a", testing::fp32_on_cpu), b("b", testing::supports_all);
  const Backend* const list[] = {&a, &b};
  EXPECT_EQ(choose(list, normalised(forward()), kCpu).value(), &a);
  EXPECT_EQ(choose(list, normalised(forward(TESSERA_BF16)), kCpu).value(), &b);
  EXPECT_EQ(choose(list, normalised(forward()), kHopper).value(), &b);
}

TEST(Choose, NotOnThisMachine) {
  DummyBackend a("a", testing::supports_all);
  const DummyBackend b("b", testing::supports_all);
  a.missing = "liba.so was not found";
  const Backend* const list[] = {&a, &b};
  EXPECT_EQ(choose(list, normalised(forward()), kCpu).value(), &b);
  const auto reasons = reasons_of(a, forward(), kCpu);
  ASSERT_EQ(reasons.size(), 1u);
  EXPECT_EQ(reasons[0].id, ReasonId::kNotLoaded);
  EXPECT_EQ(reasons[0].text, "liba.so was not found");
  EXPECT_TRUE(reasons_of(a, forward(), kCpu, /*imagined=*/true).empty());
}

// Looking for a GPU starts its driver, and then no child of fork() can.
TEST(Choose, ACallOnTheHostLooksForNoGpu) {
  const auto on_gpu = [](Support& support, const Problem&, const Device& device) {
    support.require(device.kind == TESSERA_CUDA, ReasonId::kDevice, Remedy::kNone,
                    [] { return std::string("device=cpu: must be a CUDA device"); });
  };
  const DummyBackend gpu("gpu", on_gpu), host("host", testing::fp32_on_cpu);
  const Backend* const list[] = {&gpu, &host};
  EXPECT_EQ(choose(list, normalised(forward()), kCpu).value(), &host);
  EXPECT_FALSE(choose(list, normalised(forward(TESSERA_BF16)), kCpu).ok());
  EXPECT_FALSE(choose_utilities(list, kCpu).ok());
  EXPECT_EQ(gpu.looked_for, 0);
  EXPECT_EQ(choose(list, normalised(forward()), kHopper).value(), &gpu);
  EXPECT_EQ(gpu.looked_for, 1);
}

TEST(Choose, WhoIsSlowerIsPassedByWhereAnotherRuns) {
  DummyBackend slow("slow", testing::supports_all);
  const DummyBackend narrow("narrow", testing::fp32_on_cpu);
  slow.slower = "narrow is faster";
  const Backend* const list[] = {&slow, &narrow};
  EXPECT_EQ(choose(list, normalised(forward()), kCpu).value(), &narrow);
  // Nobody else can.
  EXPECT_EQ(choose(list, normalised(forward(TESSERA_BF16)), kCpu).value(), &slow);
  // Forced, it runs what it can.
  Problem p = normalised(forward());
  std::strcpy(p.backend, "slow");
  EXPECT_EQ(choose(list, p, kCpu).value(), &slow);
  EXPECT_EQ(answer_of(slow, p, kCpu).yields, "");
  const Answer answer = answer_of(slow, normalised(forward()), kCpu);
  EXPECT_TRUE(answer.reasons.empty());
  EXPECT_EQ(answer.yields, "narrow is faster");
}

TEST(Choose, ALibraryIsOpenedOnlyForAProblemThatRunsThere) {
  DummyBackend a("a", testing::fp32_on_cpu), b("b", testing::supports_all);
  a.is_opened = true;
  const Backend* const list[] = {&a, &b};
  const Problem low = normalised(forward(TESSERA_BF16)), p = normalised(forward());
  EXPECT_EQ(choose(list, low, kCpu).value(), &b);  // not supported
  (void)reasons_of(a, low, kCpu);
  a.slower = "b is faster";
  EXPECT_EQ(choose(list, p, kCpu).value(), &b);  // yields
  (void)reasons_of(a, p, kCpu);
  Problem forced = p;
  std::strcpy(forced.backend, "b");
  EXPECT_EQ(choose(list, forced, kCpu).value(), &b);
  (void)reasons_of(a, forced, kCpu);
  (void)explain_json(list, p, kCpu, "");
  (void)choose_utilities(list, kCpu);
  EXPECT_EQ(a.looked_for, 0);
  std::strcpy(forced.backend, "a");
  EXPECT_EQ(choose(list, forced, kCpu).value(), &a);
  EXPECT_EQ(a.looked_for, 1);
}

TEST(Choose, OfThoseThatAreSlowerTheFirst) {
  DummyBackend a("a", testing::supports_all), b("b", testing::supports_all);
  const DummyBackend c("c", testing::fp32_on_cpu);
  a.slower = b.slower = "c is faster";
  const Backend* const list[] = {&a, &b, &c};
  EXPECT_EQ(choose(list, normalised(forward()), kCpu).value(), &c);
  EXPECT_EQ(choose(list, normalised(forward(TESSERA_BF16)), kCpu).value(), &a);
}

TEST(Choose, AForcedNameIsAskedAlone) {
  const DummyBackend a("a", testing::supports_all), b("b", testing::fp32_on_cpu);
  const Backend* const list[] = {&a, &b};
  Problem p = normalised(forward());
  std::strcpy(p.backend, "b");
  EXPECT_EQ(choose(list, p, kCpu).value(), &b);
  p = normalised(forward(TESSERA_FP16));
  std::strcpy(p.backend, "b");
  const auto refused = choose(list, p, kCpu);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().code(), TESSERA_REFUSED);
  EXPECT_NE(refused.status().message().find("b: dtype=fp16"), std::string::npos);
}

TEST(Choose, UnknownNamesAreInvalid) {
  const DummyBackend a("a", testing::supports_all);
  const Backend* const list[] = {&a};
  Problem p = forward();
  EXPECT_TRUE(with_forced_backend(list, p).ok());
  std::memcpy(p.backend, "sixteen_letters_", 16);  // fills the field, without a NUL
  const auto unknown = with_forced_backend(list, p);
  ASSERT_FALSE(unknown.ok());
  EXPECT_EQ(unknown.status().code(), TESSERA_INVALID);
  EXPECT_NE(unknown.status().message().find("backend=\"sixteen_letters_\": must be one of a"),
            std::string::npos);
}

// All reasons of those of the device; of those of another one, which come last, that alone.
TEST(Choose, ARefusalListsReasonsOfAllBackends) {
  DummyBackend a("a", testing::fp32_on_cpu), b("b", testing::fp32_on_cpu);
  DummyBackend c("c", [](Support& support, const Problem&, const Device&) {
    for (const char* name : {"bf16", "causal"}) {
      support.require(false, ReasonId::kFeature, Remedy::kNone, [&] { return std::string(name); });
    }
  });
  c.missing = "no driver";
  const Backend* const list[] = {&a, &b, &c};
  const auto refused = choose(list, normalised(forward(TESSERA_BF16)), kHopper);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().message(),
            "no backend supports this problem\n"
            "  c: no driver;  bf16;  causal\n"
            "  a, b: tensors are on a GPU\n"
            "repro: python -m tessera explain \"fwd bf16 b=2 sq=5 sk=7 hq=4 hk=2 dqk=8 dv=16\" "
            "--device sm90");
}

TEST(Choose, ALongRefusalKeepsItsLastLine) {
  const DummyBackend a("a", [](Support& support, const Problem&, const Device&) {
    for (int i = 0; i < 100; ++i) {
      support.require(false, ReasonId::kFeature, Remedy::kNone,
                      [] { return std::string(50, 'x'); });
    }
  });
  const Backend* const list[] = {&a};
  const std::string message = choose(list, normalised(forward()), kCpu).status().message();
  EXPECT_LT(message.size(), sizeof(tessera_error::message));
  EXPECT_NE(message.find("repro: "), std::string::npos);
}

TEST(Choose, Devices) {
  EXPECT_FALSE(import_device(nullptr).ok());
  for (const Device& bad : {Device{2, 0, 0, 0}, Device{-1, 0, 0, 0}, Device{1, -1, 0, 0},
                            Device{1, 0, -90, 0}, Device{0, 0, 0, 1}}) {
    EXPECT_FALSE(import_device(&bad).ok());
  }
  EXPECT_TRUE(import_device(&kHopper).ok());
  EXPECT_EQ(device_text(kCpu), "cpu");
  EXPECT_EQ(device_text(kHopper), "sm90");
}

class Owner final : public testing::DummyBackend {
 public:
  Owner() : DummyBackend("owner", testing::supports_all) {}
  bool owns_utilities(const Device& device) const override { return device.kind == TESSERA_CPU; }
};

TEST(ChooseUtilities, TheFirstOwner) {
  const testing::DummyBackend a("a", testing::supports_all);
  const Owner owner;
  const Backend* const list[] = {&a, &owner};
  EXPECT_EQ(choose_utilities(list, Device{}).value(), &owner);
  const auto refused = choose_utilities(list, Device{TESSERA_CUDA, 0, 90, 0});
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().code(), TESSERA_REFUSED);
  EXPECT_EQ(a.merge({}, Buffers{}, Device{}).code(), TESSERA_REFUSED);
  EXPECT_EQ(a.dropout_mask({}, Buffers{}, Device{}).code(), TESSERA_REFUSED);
}

}  // namespace
}  // namespace tessera
