// SPDX-License-Identifier: Apache-2.0
// libcuda.so.1 as far as the CUDA runtime looks at it before it starts the driver: it counts how often
// it is started, and never starts.
#include <string.h>

int driver_starts = 0;

int cuInit(unsigned flags) {
  (void)flags;
  ++driver_starts;
  return 100;  // CUDA_ERROR_NO_DEVICE
}

int cuDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}

int cuGetExportTable(const void** table, const void* id) {
  (void)table, (void)id;
  return 3;  // CUDA_ERROR_NOT_INITIALIZED
}

static int not_initialized(void) { return 3; }

int cuGetProcAddress_v2(const char* name, void** function, int version, unsigned long long flags,
                        void* status) {
  (void)version, (void)flags, (void)status;
  *function = strcmp(name, "cuInit") == 0               ? (void*)cuInit
              : strcmp(name, "cuDriverGetVersion") == 0 ? (void*)cuDriverGetVersion
              : strcmp(name, "cuGetExportTable") == 0   ? (void*)cuGetExportTable
              : strcmp(name, "cuGetProcAddress") == 0   ? (void*)cuGetProcAddress_v2
                                                        : (void*)not_initialized;
  return 0;
}
