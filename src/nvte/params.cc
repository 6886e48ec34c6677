// SPDX-License-Identifier: Apache-2.0
// Handles and their attributes: one table for each struct, made of the list that makes the struct.
#include "nvte/params.h"

#include <cstddef>
#include <cstring>
#include <type_traits>

#include "nvte/tensor.h"

namespace tessera::nvte {
namespace {

struct Attribute {
  int number;
  const char* name;
  size_t offset, size;
  bool is_flag, is_tensor;
};

#define TESSERA_NVTE_ATTRIBUTE(Struct, attribute, type, name) \
  {kNVTEFusedAttn##Struct##attribute,                         \
   #name,                                                     \
   offsetof(Struct, name),                                    \
   sizeof(type),                                              \
   std::is_same_v<type, bool>,                                \
   std::is_same_v<type, NVTETensor>},
#define TESSERA_NVTE_OF_CONFIG(attribute, type, name, value) \
  TESSERA_NVTE_ATTRIBUTE(Config, attribute, type, name)
#define TESSERA_NVTE_OF_FWD(attribute, type, name, value) \
  TESSERA_NVTE_ATTRIBUTE(FwdParams, attribute, type, name)
#define TESSERA_NVTE_OF_BWD(attribute, type, name, value) \
  TESSERA_NVTE_ATTRIBUTE(BwdParams, attribute, type, name)

constexpr Attribute kConfig[] = {TESSERA_NVTE_CONFIG_FIELDS(TESSERA_NVTE_OF_CONFIG)};
constexpr Attribute kFwd[] = {TESSERA_NVTE_FWD_FIELDS(TESSERA_NVTE_OF_FWD)};
constexpr Attribute kBwd[] = {TESSERA_NVTE_BWD_FIELDS(TESSERA_NVTE_OF_BWD)};

// Row i is attribute i, of all of them.
template <size_t kRows>
constexpr bool is_complete(const Attribute (&rows)[kRows], int attributes) {
  for (size_t i = 0; i < kRows; ++i) {
    if (rows[i].number != static_cast<int>(i)) return false;
  }
  return static_cast<int>(kRows) == attributes;
}
static_assert(is_complete(kConfig, kNVTEFusedAttnConfigNumAttributes));
static_assert(is_complete(kFwd, kNVTEFusedAttnFwdParamsNumAttributes));
static_assert(is_complete(kBwd, kNVTEFusedAttnBwdParamsNumAttributes));

template <size_t kRows>
const Attribute& row_of(const Attribute (&rows)[kRows], int attribute) {
  if (attribute >= 0 && attribute < static_cast<int>(kRows)) return rows[attribute];
  fail("attr=%d: must be 0 to %zu; a later version of TransformerEngine may have more", attribute,
       kRows - 1);
}

void* handle_of(void* handle, const char* name, const char* maker) {
  if (!handle) fail("%s=null: must be a handle, of %s", name, maker);
  return handle;
}

void check_size(const Attribute& row, size_t size_in_bytes) {
  if (size_in_bytes < row.size) {
    fail("size_in_bytes=%zu: must be at least %zu, the bytes of %s", size_in_bytes, row.size,
         row.name);
  }
}

void get(const void* handle, const Attribute& row, void* buf, size_t size_in_bytes,
         size_t* size_written) {
  if (size_written) *size_written = row.size;
  if (!buf) return;
  check_size(row, size_in_bytes);
  std::memcpy(buf, static_cast<const char*>(handle) + row.offset, row.size);
}

void set(void* handle, const Attribute& row, const void* buf, size_t size_in_bytes) {
  if (!buf) fail("buf=null: must point to %s", row.name);
  check_size(row, size_in_bytes);
  void* const to = static_cast<char*>(handle) + row.offset;
  if (row.is_flag) {
    *static_cast<bool*>(to) = *static_cast<const uint8_t*>(buf) != 0;
  } else {
    std::memcpy(to, buf, row.size);
  }
}

template <size_t kRows>
void check_tensors(const Attribute (&rows)[kRows], const void* params) {
  for (const Attribute& row : rows) {
    NVTETensor tensor;
    if (!row.is_tensor) continue;
    std::memcpy(&tensor, static_cast<const char*>(params) + row.offset, sizeof tensor);
    tensor_of(tensor, row.name);
  }
}

}  // namespace

const Config& config_of(NVTEFusedAttnConfig handle) {
  return *static_cast<const Config*>(handle_of(handle, "config", "nvte_create_fused_attn_config"));
}
const FwdParams& fwd_params_of(NVTEFusedAttnFwdParams handle) {
  return *static_cast<const FwdParams*>(
      handle_of(handle, "params", "nvte_create_fused_attn_fwd_params"));
}
const BwdParams& bwd_params_of(NVTEFusedAttnBwdParams handle) {
  return *static_cast<const BwdParams*>(
      handle_of(handle, "params", "nvte_create_fused_attn_bwd_params"));
}

void check_tensors(const FwdParams& params) { check_tensors(kFwd, &params); }
void check_tensors(const BwdParams& params) { check_tensors(kBwd, &params); }

}  // namespace tessera::nvte

using namespace tessera::nvte;

// Four functions of a handle.
#define TESSERA_NVTE_HANDLE(Struct, word, rows, name)                                          \
  NVTEFusedAttn##Struct tessera_nvte_create_fused_attn_##word(void) { return new Struct; }     \
  void tessera_nvte_destroy_fused_attn_##word(NVTEFusedAttn##Struct handle) {                  \
    delete static_cast<Struct*>(handle);                                                       \
  }                                                                                            \
  void tessera_nvte_get_fused_attn_##word##_attribute(                                         \
      NVTEFusedAttn##Struct handle, NVTEFusedAttn##Struct##Attribute attr, void* buf,          \
      size_t size_in_bytes, size_t* size_written) {                                            \
    named("nvte_get_fused_attn_" #word "_attribute", [&] {                                     \
      const void* of = handle_of(handle, name, "nvte_create_fused_attn_" #word);               \
      get(of, row_of(rows, attr), buf, size_in_bytes, size_written);                           \
    });                                                                                        \
  }                                                                                            \
  void tessera_nvte_set_fused_attn_##word##_attribute(NVTEFusedAttn##Struct handle,            \
                                                      NVTEFusedAttn##Struct##Attribute attr,   \
                                                      const void* buf, size_t size_in_bytes) { \
    named("nvte_set_fused_attn_" #word "_attribute", [&] {                                     \
      void* of = handle_of(handle, name, "nvte_create_fused_attn_" #word);                     \
      set(of, row_of(rows, attr), buf, size_in_bytes);                                         \
    });                                                                                        \
  }

TESSERA_NVTE_HANDLE(Config, config, kConfig, "config")
TESSERA_NVTE_HANDLE(FwdParams, fwd_params, kFwd, "params")
TESSERA_NVTE_HANDLE(BwdParams, bwd_params, kBwd, "params")
