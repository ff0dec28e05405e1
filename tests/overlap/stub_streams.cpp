// A libcuda for tests: as tests/runtime/stub_driver.cpp, and what is enqueued says which stream it goes to, kernels by name.
#define cuLibraryGetKernel unnamed_kernel
#define cuLaunchKernelEx unnamed_launch
#define cuStreamWriteValue32_v2 unnamed_write
#define cuStreamWaitValue32_v2 unnamed_wait
#define cuEventRecord unnamed_record
#define cuStreamWaitEvent unnamed_wait_event
#define cuStreamIsCapturing unnamed_capturing
#include "../runtime/stub_driver.cpp"
#undef cuLibraryGetKernel
#undef cuLaunchKernelEx
#undef cuStreamWriteValue32_v2
#undef cuStreamWaitValue32_v2
#undef cuEventRecord
#undef cuStreamWaitEvent
#undef cuStreamIsCapturing

static int word(const char* what, void* stream, uint64_t at, uint32_t value) {
  char t[96]; snprintf(t, 96, "%s %u at %lu stream %lu", what, value, (unsigned long)at, (unsigned long)stream); note(t); return 0;
}

extern "C" {
int cuLibraryGetKernel(void** kernel, void*, const char* name) { *kernel = strdup(name); return 0; }
int cuLaunchKernelEx(const LaunchConfig* c, void* kernel, void**, void**) {
  char t[160]; snprintf(t, 160, "launch %s ctas %u stream %lu", (const char*)kernel, c->grid[0], (unsigned long)c->stream); note(t); return 0;
}
int cuStreamWriteValue32_v2(void* stream, uint64_t at, uint32_t value, unsigned) { return word("write", stream, at, value); }
int cuStreamWaitValue32_v2(void* stream, uint64_t at, uint32_t value, unsigned) { return word("wait", stream, at, value); }
int cuEventRecord(void* event, void* stream) {
  char t[96]; snprintf(t, 96, "record event %lu stream %lu", (unsigned long)event, (unsigned long)stream); note(t); return 0;
}
int cuStreamWaitEvent(void* stream, void* event, unsigned) {
  char t[96]; snprintf(t, 96, "follow event %lu stream %lu", (unsigned long)event, (unsigned long)stream); note(t); return 0;
}
int cuStreamIsCapturing(void*, int* capturing) { *capturing = getenv("STUB_DRIVER_CAPTURING") ? 1 : 0; return 0; }
}
