// SPDX-License-Identifier: Apache-2.0
// Where TransformerEngine's header was. A folder with this file, first among the include folders,
// is all that a source needs that was written against TransformerEngine's attention.
#include <tessera_nvte.h>
