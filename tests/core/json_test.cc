// SPDX-License-Identifier: Apache-2.0
#include "core/json.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

TEST(Json, NestsAndSeparates) {
  JsonWriter json;
  json.begin_object();
  json.key("a").number(-3);
  json.key("b").begin_array().string("x").null().boolean(true).begin_object().end_object();
  json.end_array();
  json.key("c").begin_object().key("d").raw("[1]").end_object();
  EXPECT_EQ(std::move(json.end_object()).take(),
            R"({"a": -3, "b": ["x", null, true, {}], "c": {"d": [1]}})");
}

TEST(Json, Escapes) {
  JsonWriter json;
  json.string(std::string("q\"\\\n\t\x01 \xC3\xA9", 9));
  EXPECT_EQ(std::move(json).take(), "\"q\\\"\\\\\\n\\u0009\\u0001 \xC3\xA9\"");
}

}  // namespace
}  // namespace tessera
