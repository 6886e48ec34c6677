// SPDX-License-Identifier: Apache-2.0
// The text of a call, as bindings read it; _call.py writes it:
//
//   in=q+k+v@2,bias pass=backward causal=True window_left=8 softcap=20.0 max_seqlen_q=$0 out=dq+dk+dv@2
//
// `in` and `out` name the tensors of each array in its order: "k+v@2" is one array whose axis 2 has k and
// v as its items, "o:float32" an output of that dtype instead of its usual one. Names of scalars are those
// of core/problem/fields.def; what is not said is zero, and $i is the i-th of integers that come beside
// the text.
#pragma once

#include <array>
#include <charconv>
#include <cstring>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/problem/fields.h"
#include "describe.h"

namespace tessera_front {

// One array of a call.
struct Operand {
  static constexpr int kMostItems = 4;
  std::array<uint8_t, kMostItems> tensors{};  // enum tessera_index, of each item
  int items = 0;
  int axis = -1;  // the items' own; -1: one tensor is the whole array
  int32_t dtype = TESSERA_NONE;
};

struct Call {
  tessera_problem problem{};  // the scalars of both
  tessera_buffers buffers{};
  std::vector<Operand> inputs, outputs;
  std::vector<const tessera::Field*> sizes;  // what $0, $1, ... stand for

  bool takes(int index) const {
    for (const Operand& operand : inputs) {
      for (int i = 0; i < operand.items; ++i) {
        if (operand.tensors[i] == index) return true;
      }
    }
    return false;
  }
};

namespace text {

using View = std::string_view;

[[noreturn]] inline void refuse(View field, View value, const std::string& rule) {
  fail("tessera: the text of a call has " + std::string(field) + "=" + std::string(value) + ": " +
       rule);
}

// body(part) of the parts of a text between separators.
template <typename Body>
void split(View text, char separator, const Body& body) {
  for (size_t end = 0; end != View::npos; text.remove_prefix(end == View::npos ? 0 : end + 1)) {
    end = text.find(separator);
    body(text.substr(0, end));
  }
}

template <typename Number>
bool number(View text, Number& out) {
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, out);
  return error == std::errc{} && stop == end && !text.empty();
}

// Names of enum tessera_index and of enum tessera_dtype, as Python has them.
inline constexpr View kTensors[] = {
#define TESSERA_TENSOR(INDEX, name, keyword, rank, role, rule) #name,
#include "core/problem/tensors.def"
#undef TESSERA_TENSOR
};
inline constexpr View kDtypes[] = {"",        "float32",       "bfloat16",    "float16",
                                   "float64", "float8_e4m3fn", "float8_e5m2", "bool",
                                   "int32",   "int64"};

template <size_t n>
int place_in(const View (&names)[n], View name, View field) {
  std::string known;
  for (size_t i = 0; i < n; ++i) {
    if (names[i] == name && !name.empty()) return static_cast<int>(i);
    known += (i ? ", " : "") + std::string(names[i]);
  }
  refuse(field, name, "no such name; this library knows " + known);
}

inline Operand operand(View field, View text) {
  Operand found;
  const View whole = text;
  if (const size_t colon = text.find(':'); colon != View::npos) {
    found.dtype = place_in(kDtypes, text.substr(colon + 1), field);
    text = text.substr(0, colon);
  }
  if (const size_t at = text.find('@'); at != View::npos) {
    if (!number(text.substr(at + 1), found.axis) || found.axis < 0 || found.axis > 4) {
      refuse(field, whole, "an axis is a number from 0 to 4, as in k+v@2");
    }
    text = text.substr(0, at);
  }
  split(text, '+', [&](View name) {
    if (found.items == Operand::kMostItems || (found.items == 1 && found.axis < 0)) {
      refuse(field, whole, "tensors of one array are up to 4 items of an axis, as in k+v@2");
    }
    found.tensors[found.items++] = static_cast<uint8_t>(place_in(kTensors, name, field));
  });
  return found;
}

// Where a call has a member.
inline char* member(tessera_problem& problem, tessera_buffers& buffers,
                    const tessera::Field& field) {
  return (field.of_buffers ? reinterpret_cast<char*>(&buffers)
                           : reinterpret_cast<char*>(&problem)) +
         field.offset;
}

}  // namespace text

// Sets an integer, and the flag that it is given.
inline void set(tessera_problem& problem, tessera_buffers& buffers, const tessera::Field& field,
                int64_t value) {
  problem.flags |= field.flag;
  char* const at = text::member(problem, buffers, field);
  const auto narrow = static_cast<int32_t>(value);
  if (field.size == sizeof value) {
    std::memcpy(at, &value, sizeof value);
  } else if (narrow == value) {
    std::memcpy(at, &narrow, sizeof narrow);
  } else {
    text::refuse(field.name, std::to_string(value), "must fit int32");
  }
}

namespace text {

inline void set_word(Call& call, const tessera::Field& field, View value) {
  int64_t number = 0;
  bool known = false;
  split(field.words, ' ', [&](View word) {
    known |= word == value;
    number += !known;
  });
  if (!known) refuse(field.name, value, "must be one of " + std::string(field.words));
  set(call.problem, call.buffers, field, number);
}

inline void set_integer(Call& call, const tessera::Field& field, View value) {
  int64_t integer = 0;
  const bool later = value.starts_with('$');
  if (!number(later ? value.substr(1) : value, integer)) {
    refuse(field.name, value, "must be an integer, or $i for one beside the text");
  }
  if (!later) return set(call.problem, call.buffers, field, integer);
  constexpr int64_t kMostSizes = 64;
  if (integer < 0 || integer >= kMostSizes) refuse(field.name, value, "must be from $0 to $63");
  if (call.sizes.size() <= static_cast<size_t>(integer)) call.sizes.resize(integer + 1);
  call.sizes[integer] = &field;
}

inline void set_number(Call& call, const tessera::Field& field, View value) {
  double real = 0;
  if (!number(value, real)) refuse(field.name, value, "must be a number such as 20.0");
  call.problem.flags |= field.flag;
  std::memcpy(member(call.problem, call.buffers, field), &real, sizeof real);
}

inline void set_scalar(Call& call, View name, View value) {
  std::string known;
  for (const tessera::Field& field : tessera::kFields) {
    if (field.name != name) {
      known += ", " + std::string(field.name);
      continue;
    }
    switch (field.kind) {
      case tessera::Field::kFlag:
        if (value != "True") refuse(name, value, "must be True, or left out");
        call.problem.flags |= field.flag;
        return;
      case tessera::Field::kWord:
        return set_word(call, field, value);
      case tessera::Field::kInteger:
        return set_integer(call, field, value);
      case tessera::Field::kNumber:
        return set_number(call, field, value);
      case tessera::Field::kText:
        if (value.size() >= field.size) refuse(name, value, "must be shorter");
        value.copy(member(call.problem, call.buffers, field), value.size());
        return;
    }
  }
  refuse(name, value, "no such name; this library knows in, out" + known);
}

}  // namespace text

// Throws for what this library does not know, which a text of another version may have.
inline Call read_call(std::string_view line) {
  Call call;
  call.problem.struct_size = sizeof call.problem;
  call.buffers.struct_size = sizeof call.buffers;
  text::split(line, ' ', [&](text::View word) {
    if (word.empty()) return;
    const text::View name = word.substr(0, word.find('='));
    if (name.size() == word.size()) text::refuse(word, "", "must be name=value");
    const text::View value = word.substr(name.size() + 1);
    if (name != "in" && name != "out") return text::set_scalar(call, name, value);
    std::vector<Operand>& operands = name == "in" ? call.inputs : call.outputs;
    text::split(value, ',',
                [&](text::View part) { operands.push_back(text::operand(name, part)); });
  });
  for (const tessera::Field* field : call.sizes) {
    if (field == nullptr) fail("tessera: the text of a call has no name for one of its sizes");
  }
  return call;
}

// The call of a text, which a thread reads once; it stays until the thread's next new text.
inline const Call& call_of(std::string_view line) {
  constexpr size_t kMostCalls = 256;
  struct Hash {
    using is_transparent = void;
    size_t operator()(std::string_view text) const { return std::hash<std::string_view>{}(text); }
  };
  thread_local std::unordered_map<std::string, Call, Hash, std::equal_to<>> calls;
  if (const auto found = calls.find(line); found != calls.end()) return found->second;
  Call call = read_call(line);
  if (calls.size() >= kMostCalls) calls.clear();
  return calls.emplace(line, std::move(call)).first->second;
}

}  // namespace tessera_front
