// SPDX-License-Identifier: Apache-2.0
// Case text: any bytes are a case, which reads back as it is written, or one clear error.
#include "core/case/case.h"
#include "fuzz/memory.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Bytes bytes(data, size);
  const std::string text(reinterpret_cast<const char*>(data), size);
  tessera_device device{};
  // The same text has the same device, which is on a GPU that is only imagined.
  if (size % 3 != 0) device.kind = TESSERA_CUDA, device.arch = size % 3 == 1 ? 80 : 90;
  tessera_error error{};
  error.struct_size = sizeof error;
  char answer[256];
  const int64_t needed =
      tessera_explain(nullptr, text.c_str(), &device, answer, sizeof answer, &error);
  FUZZ_CHECK(needed == -1 || needed > 1);
  fuzz::check_error(needed == -1 ? error.code : TESSERA_OK, error);
  FUZZ_CHECK((needed == -1) == (error.code != TESSERA_OK));

  const auto parsed = tessera::parse_case(text);
  if (!parsed.ok()) return 0;
  const std::string line = tessera::to_text(parsed.value());
  const auto again = tessera::parse_case(line);
  FUZZ_CHECK(again.ok());
  FUZZ_CHECK(again.value() == parsed.value());
  FUZZ_CHECK(tessera::to_text(again.value()) == line);
  return 0;
}
