// SPDX-License-Identifier: Apache-2.0
// libcudnn.so.9 as far as it is looked at before a problem runs. VERSION: what it says it is; LACKS: a
// function is missing.
#include <stddef.h>

size_t cudnnGetVersion(void) { return VERSION; }
#define FUNCTION(name) \
  int name(void) { return 1; }
FUNCTION(cudnnBackendCreateDescriptor)
FUNCTION(cudnnBackendDestroyDescriptor)
#ifndef LACKS
FUNCTION(cudnnBackendExecute)
#endif
FUNCTION(cudnnBackendFinalize)
FUNCTION(cudnnBackendGetAttribute)
FUNCTION(cudnnBackendSetAttribute)
FUNCTION(cudnnCreate)
FUNCTION(cudnnGetErrorString)
FUNCTION(cudnnGetLastErrorString)
FUNCTION(cudnnGetStream)
FUNCTION(cudnnSetStream)
