/* A libcuda.so.1 as far as CUDA's runtime asks it before it counts devices. FAKE_CUDA says the
 * newest CUDA it knows (12040) and how many GPUs it shows. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

static int version, devices;

int cuInit(unsigned flags) {
  (void)flags;
  return devices ? 0 : 100; /* CUDA_ERROR_NO_DEVICE */
}
int cuDriverGetVersion(int* out) { return *out = version, 0; }
int cuDeviceGetCount(int* out) { return *out = devices, 0; }
int cuGetExportTable(const void** table, const void* id) {
  (void)id;
  return *table = NULL, 500; /* CUDA_ERROR_NOT_FOUND */
}

/* Every other function is there, and does nothing. */
static int other(void) { return 0; }

int cuGetProcAddress_v2(const char* symbol, void** function, int at, unsigned long long flags,
                        int* status) {
  (void)at, (void)flags;
  Dl_info self;
  dladdr((void*)&cuInit, &self);
  *function = dlsym(dlopen(self.dli_fname, RTLD_NOLOAD | RTLD_LAZY), symbol);
  if (!*function) *function = (void*)&other;
  if (status) *status = 0;
  return 0;
}
int cuGetProcAddress(const char* symbol, void** function, int at, unsigned long long flags) {
  return cuGetProcAddress_v2(symbol, function, at, flags, NULL);
}

__attribute__((constructor)) static void read_what_to_say(void) {
  sscanf(getenv("FAKE_CUDA"), "%d,%d", &version, &devices);
}
