// A libcuda for tests on machines without one: it accepts every call, and writes launches and tensor maps to the file
// STUB_DRIVER_LOG as lines of text.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>

static void note(const char* text) {
  FILE* f = fopen(getenv("STUB_DRIVER_LOG"), "a");
  fprintf(f, "%s\n", text);
  fclose(f);
}

static int answer() { return 0; }

extern "C" {
struct LaunchConfig { unsigned grid[3], block[3], shared; void* stream; unsigned char* attrs; unsigned count; };

int cuInit(unsigned) { return 0; }
int cuDriverGetVersion(int* v) { *v = 13000; return 0; }
int cuDeviceGet(int* device, int ordinal) { *device = ordinal; return 0; }
int cuDevicePrimaryCtxRetain(void** ctx, int device) { *ctx = (void*)(uintptr_t)(100 + device); return 0; }
int cuCtxGetCurrent(void** ctx) { *ctx = nullptr; return 0; }
int cuCtxPushCurrent_v2(void* ctx) { char t[64]; snprintf(t, 64, "push %lu", (unsigned long)ctx); note(t); return 0; }
int cuCtxPopCurrent_v2(void** ctx) { *ctx = nullptr; note("pop"); return 0; }
int cuLibraryLoadData(void** library, const void* code, void*, void*, unsigned, void*, void*, unsigned) {
  if (memcmp(code, "\177ELF", 4) != 0) return 200;  // CUDA_ERROR_INVALID_IMAGE
  *library = (void*)7; note("load"); return 0;
}
int cuLibraryGetKernel(void** kernel, void*, const char*) { *kernel = (void*)8; return 0; }
int cuKernelSetAttribute(int, int value, void*, int device) {
  char t[64]; snprintf(t, 64, "allow %d on %d", value, device); note(t); return 0;
}
// The kernels of the tests take one tensor map, then a struct of 16 bytes.
int cuLaunchKernelEx(const LaunchConfig* c, void*, void** args, void**) {
  if (c->grid[0] == 0) return 1;  // CUDA_ERROR_INVALID_VALUE
  char line[512];
  int n = snprintf(line, sizeof line, "launch grid %u %u %u block %u %u %u shared %u stream %lu aligned %d map %d body", c->grid[0],
                   c->grid[1], c->grid[2], c->block[0], c->block[1], c->block[2], c->shared, (unsigned long)c->stream,
                   (uintptr_t)args[0] % 128 == 0, *(unsigned char*)args[0]);
  for (int i = 0; i < 4; ++i) n += snprintf(line + n, sizeof line - n, " %d", ((int*)args[1])[i]);
  note(line);
  for (unsigned i = 0; i < c->count; ++i) {  // each attribute: id, padding, 64 bytes of value
    char t[64]; const int* a = (const int*)(c->attrs + 72 * i);
    snprintf(t, 64, "attribute %d: %d %d %d", a[0], a[2], a[3], a[4]); note(t);
  }
  return 0;
}
int cuTensorMapEncodeTiled(unsigned char* map, int type, unsigned rank, void* address, const uint64_t* sizes,
                           const uint64_t* strides, const uint32_t* box, const uint32_t* steps, int, int swizzle, int, int) {
  char line[512];
  memset(map, 42, 128);
  int n = snprintf(line, sizeof line, "map aligned %d type %d at %lu swizzle %d", (uintptr_t)map % 128 == 0, type,
                   (unsigned long)address, swizzle);
  for (unsigned i = 0; i < rank; ++i)
    n += snprintf(line + n, sizeof line - n, " | %lu %lu %u %u", (unsigned long)sizes[i], i ? (unsigned long)strides[i - 1] : 0, box[i], steps[i]);
  note(line);
  return 0;
}
int cuTensorMapReplaceAddress(unsigned char* map, void* address) {
  char t[64]; snprintf(t, 64, "map %d lies at %lu now", *map, (unsigned long)address); note(t);
  *map += 1; return (uintptr_t)address % 16 ? 1 : 0;
}
int cuStreamWriteValue32_v2(void*, uint64_t at, uint32_t value, unsigned) {
  char t[64]; snprintf(t, 64, "write %u at %lu", value, (unsigned long)at); note(t); return 0;
}
int cuStreamWaitValue32_v2(void*, uint64_t at, uint32_t value, unsigned flags) {
  char t[64]; snprintf(t, 64, "wait %u at %lu flags %u", value, (unsigned long)at, flags); note(t); return 0;
}
struct MemoryOperation {  // CUstreamBatchMemOpParams
  unsigned operation; uint64_t address; uint64_t value; unsigned flags; uint64_t alias, rest;
};
int cuStreamBatchMemOp_v2(void* stream, unsigned count, const MemoryOperation* o, unsigned flags) {
  static_assert(sizeof(MemoryOperation) == 48);
  char t[120]; snprintf(t, 120, "%u words on stream %lu flags %u", count, (unsigned long)stream, flags); note(t);
  for (unsigned i = 0; i < count; ++i) {
    snprintf(t, 120, "operation %u of %lu at %lu flags %u rest %lu", o[i].operation, (unsigned long)o[i].value, (unsigned long)o[i].address,
             o[i].flags, (unsigned long)(o[i].alias | o[i].rest)); note(t);
  }
  return 0;
}
int cuEventRecord(void* event, void* stream) {
  char t[64]; snprintf(t, 64, "record %lu on %lu", (unsigned long)event, (unsigned long)stream); note(t); return event ? 0 : 1;
}
int cuStreamWaitEvent(void* stream, void* event, unsigned flags) {
  char t[64]; snprintf(t, 64, "stream %lu waits for %lu flags %u", (unsigned long)stream, (unsigned long)event, flags); note(t); return 0;
}
int cuStreamIsCapturing(void* stream, int* status) { *status = (unsigned long)stream == 6; return 0; }
int cuMemcpyAsync(uint64_t into, uint64_t source, size_t size, void* stream) {
  char t[96]; snprintf(t, 96, "copy %lu from %lu to %lu stream %lu", size, (unsigned long)source, (unsigned long)into, (unsigned long)stream);
  note(t); return stream ? 0 : 1;
}
struct Copy2D {
  size_t x, y; int kind; const void* host; uint64_t device; void* array; size_t pitch;
  size_t to_x, to_y; int to_kind; void* to_host; uint64_t to_device; void* to_array; size_t to_pitch, width, height;
};
int cuMemcpy2DAsync_v2(const Copy2D* c, void* stream) {
  char t[160];
  snprintf(t, 160, "copy %lu x %lu from %lu by %lu to %lu by %lu kinds %d %d stream %lu rest %d", c->height, c->width, (unsigned long)c->device,
           c->pitch, (unsigned long)c->to_device, c->to_pitch, c->kind, c->to_kind, (unsigned long)stream,
           c->x || c->y || c->to_x || c->to_y || c->host || c->to_host || c->array || c->to_array);
  note(t); return 0;
}
// The bindings ask here for every function: ours by either name, or one that does nothing.
int cuGetProcAddress_v2(const char* name, void** function, int, uint64_t, int* status) {
  Dl_info self;
  dladdr((void*)&cuInit, &self);
  void* library = dlopen(self.dli_fname, RTLD_NOW);
  char versioned[128];
  snprintf(versioned, sizeof versioned, "%s_v2", name);
  *function = dlsym(library, versioned);
  if (!*function) *function = dlsym(library, name);
  if (!*function) *function = (void*)&answer;
  if (status) *status = 0;
  return 0;
}
}
