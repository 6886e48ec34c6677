// SPDX-License-Identifier: Apache-2.0
// libcudnn.so.9 as far as it is looked at before a problem runs: it refuses every plan. VERSION: what it
// says it is; LACKS: a function is missing.
#include <stddef.h>
#include <stdio.h>

size_t cudnnGetVersion(void) { return VERSION; }
#define FUNCTION(name) \
  int name(void) { return 1; }
int cudnnBackendCreateDescriptor(void) { return 3000; }  // CUDNN_STATUS_NOT_SUPPORTED
FUNCTION(cudnnBackendDestroyDescriptor)
#ifndef LACKS
FUNCTION(cudnnBackendExecute)
#endif
FUNCTION(cudnnBackendFinalize)
FUNCTION(cudnnBackendGetAttribute)
FUNCTION(cudnnBackendSetAttribute)
FUNCTION(cudnnCreate)
const char* cudnnGetErrorString(int status) { return status == 3000 ? "NOT_SUPPORTED" : "other"; }
void cudnnGetLastErrorString(char* message, size_t size) {
  snprintf(message, size, "a stand-in plans nothing");
}
FUNCTION(cudnnGetStream)
FUNCTION(cudnnSetStream)
