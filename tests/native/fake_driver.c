/* A CUDA driver that does nothing but tell what it was asked, one line a call, in the file FAKE_CUDA_LOG.
   Contexts are 0x1000 + ordinal; events below 100 are done, 100 to 199 pending until asked three times,
   others failed. Copies are made at once, but for those of 17 bytes, which are refused. Graphs are captured on
   stream 5; stream 6 is the legacy stream beside one. Unregistering tells whether the memory was still mapped. */
#define _DEFAULT_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static __thread void* context;
static __thread int mode; /* global, as a thread starts */
static int asked;

static void tell(const char* what, unsigned long a, unsigned long b) {
    FILE* log = fopen(getenv("FAKE_CUDA_LOG"), "a");
    fprintf(log, "%s %lu %lu context=%lx mode=%d\n", what, a, b, (unsigned long)context, mode);
    fclose(log);
}

int cuInit(unsigned flags) { return (int)flags; }
int cuDeviceGetCount(int* count) { *count = atoi(getenv("FAKE_CUDA_DEVICES")); return 0; }
int cuDeviceGet(int* device, int ordinal) { *device = ordinal; return ordinal < 2 ? 0 : 101; }
int cuDevicePrimaryCtxRetain(void** out, int device) {
    tell("retain", (unsigned long)device, 0);
    *out = (void*)(0x1000ul + (unsigned long)device);
    return 0;
}
int cuCtxSetCurrent(void* wanted) { context = wanted; return 0; }
int cuCtxGetCurrent(void** out) { *out = context; return 0; }
int cuMemHostRegister_v2(void* address, size_t bytes, unsigned flags) {
    tell("register", bytes, flags);
    return bytes == 13 ? 712 : (address == 0);
}
int cuMemHostUnregister(void* address) {
    void* page = (void*)((uintptr_t)address & ~(uintptr_t)4095);
    tell("unregister", msync(page, 4096, MS_ASYNC) == 0, 0);
    return address == 0;
}
int cuMemcpyDtoHAsync_v2(void* host, unsigned long long device, size_t bytes, void* stream) {
    tell("copy", bytes, (unsigned long)stream);
    if (bytes == 17) return 719;
    memcpy(host, (void*)device, bytes);
    return 0;
}
int cuThreadExchangeStreamCaptureMode(int* other) { int was = mode; mode = *other; *other = was; return 0; }
int cuEventQuery(void* event) {
    unsigned long number = (unsigned long)event;
    if (number < 100) return 0;
    if (number >= 200) return 719;
    if (++asked == 1) tell("query", number, 0);
    return asked < 3 ? 600 : 0;
}
int cuEventCreate(void** out, unsigned flags) {
    static unsigned long events = 1000;
    *out = (void*)++events;
    return flags == 3 ? 0 : 1;
}
int cuEventRecord(void* event, void* stream) { tell("record", (unsigned long)event, (unsigned long)stream); return 0; }
int cuEventSynchronize(void* event) { tell("wait", (unsigned long)event, 0); return 0; }
int cuStreamWaitEvent(void* stream, void* event, unsigned flags) {
    tell("hold", (unsigned long)stream, (unsigned long)event);
    return (int)flags;
}
int cuStreamSynchronize(void* stream) { tell("synchronize", (unsigned long)stream, 0); return 0; }
int cuStreamIsCapturing(void* stream, int* status) {
    *status = (unsigned long)stream == 5;
    return (unsigned long)stream == 6 ? 906 : 0;
}
int cuGetErrorName(int code, const char** name) { *name = code == 712 ? "ALREADY" : "FAULT"; return 0; }
int cuGetErrorString(int code, const char** text) { *text = code == 712 ? "registered already" : "no"; return 0; }
