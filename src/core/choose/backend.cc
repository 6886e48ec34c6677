// SPDX-License-Identifier: Apache-2.0
#include "core/choose/backend.h"

namespace tessera {

Status Backend::merge(const MergeArgs&, const Buffers&, const Device&) const {
  return Status(TESSERA_REFUSED, std::string(name()) + ": has no merge");
}

Status Backend::dropout_mask(const DropoutMaskArgs&, const Buffers&, const Device&) const {
  return Status(TESSERA_REFUSED, std::string(name()) + ": has no dropout_mask");
}

Status Backend::sum_rows(const RowSums&, const Buffers&, const Device&) const {
  return Status(TESSERA_REFUSED, std::string(name()) + ": has no sum_rows");
}

Status Backend::rotate(const tessera_rotate_args&, const Buffers&, const Device&) const {
  return Status(TESSERA_REFUSED, std::string(name()) + ": has no rotate");
}

Status Backend::append(const tessera_append_args&, const Buffers&, const Device&) const {
  return Status(TESSERA_REFUSED, std::string(name()) + ": has no append_kv");
}

}  // namespace tessera
