/* A CUDA driver that does nothing but tell what it was asked, one line a call, in the file FAKE_CUDA_LOG.
   Contexts are 0x1000 + ordinal. Copies are made at once, but for those of 17 bytes, which are refused. Graphs are captured on
   stream 5; stream 6 is the legacy stream beside one. Unregistering logs whether the memory was still mapped.
   The kernel of digests is the emulated one, run at once; what FAKE_CUDA_REFUSES names (module, function, fill,
   launch, memory, wait, copy, elapsed, "register " and an address) is refused; "assert" refuses all work as after a
   failed device assert; "digests" and "copies" come out wrong; "memory for names" makes those of errors 64 MiB
   long. Device N is at the PCI address 0000:1a+N:03.0. */
#define _DEFAULT_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static __thread void* context;
static __thread int mode; /* global, as a thread starts */

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
static int refused(const char* what);
int cuMemHostRegister_v2(void* address, size_t bytes, unsigned flags) {
    char asked[64];
    tell("register", bytes, (unsigned long)address);
    snprintf(asked, sizeof asked, "register %lu", (unsigned long)address);
    if (refused(asked)) return 2;
    return bytes == 13 ? 712 : (address == 0 || flags != 1);
}
int cuMemHostUnregister(void* address) {
    void* page = (void*)((uintptr_t)address & ~(uintptr_t)4095);
    tell("unregister", msync(page, 4096, MS_ASYNC) == 0, (unsigned long)address);
    return address == 0;
}
int cuMemcpyDtoHAsync_v2(void* host, unsigned long long device, size_t bytes, void* stream) {
    tell("copy", bytes, (unsigned long)stream);
    if (bytes == 17 || refused("copy")) return 719;
    if (refused("assert")) return 710;
    memcpy(host, (void*)device, bytes);
    return 0;
}
int cuThreadExchangeStreamCaptureMode(int* other) { int was = mode; mode = *other; *other = was; return 0; }
int cuEventCreate(void** out, unsigned flags) {
    static unsigned long events = 1000;
    *out = (void*)++events;
    return flags == 3 ? 0 : 1;
}
int cuEventRecord(void* event, void* stream) {
    tell("record", (unsigned long)event, (unsigned long)stream);
    return refused("assert") ? 710 : 0;
}
int cuEventSynchronize(void* event) {
    tell("wait", (unsigned long)event, 0);
    return refused("wait") ? 719 : refused("assert") ? 710 : 0;
}
int cuEventElapsedTime(float* milliseconds, void* start, void* end) {
    tell("elapsed", (unsigned long)start, (unsigned long)end);
    *milliseconds = 250;
    return (unsigned long)end == 9 ? 600 : refused("elapsed") ? 719 : refused("assert") ? 710 : 0; /* 9: not passed yet */
}
int cuStreamWaitEvent(void* stream, void* event, unsigned flags) {
    tell("hold", (unsigned long)stream, (unsigned long)event);
    return refused("assert") ? 710 : (int)flags;
}
int cuStreamCreate(void** stream, unsigned flags) { *stream = (void*)77ul; return flags != 1; }
int cuStreamSynchronize(void* stream) { tell("synchronize", (unsigned long)stream, 0); return 0; }
int cuStreamIsCapturing(void* stream, int* status) {
    if (refused("assert")) return 710;
    *status = (unsigned long)stream == 5;
    return (unsigned long)stream == 6 ? 906 : 0;
}
static int refused(const char* what) {
    const char* refuses = getenv("FAKE_CUDA_REFUSES");
    return refuses != NULL && strcmp(refuses, what) == 0;
}
int cuStreamDestroy_v2(void* stream) { tell("stream gone", (unsigned long)stream, 0); return 0; }
int cuMemAlloc_v2(unsigned long long* address, size_t bytes) {
    if (refused("memory")) return 2;
    *address = (unsigned long)malloc(bytes);
    return 0;
}
int cuMemFree_v2(unsigned long long address) { tell("memory gone", 0, 0); free((void*)address); return 0; }
int cuMemcpyHtoDAsync_v2(unsigned long long device, const void* host, size_t bytes, void* stream) {
    memcpy((void*)device, host, bytes);
    return stream == NULL;
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
    *value = attribute == 16 ? 2 + device : attribute == 33 ? 0x1a + device : attribute == 34 ? 3 : attribute == 50 ? 0 : -1;
    return 0;
}
int cuModuleLoadDataEx(void** module, const char* image, unsigned count, int* options, void** values) {
    tell("module", strlen(image), count);
    if (strstr(image, ".version 7.8") == NULL || strstr(image, ".target sm_50") == NULL) return 218;
    if (refused("module")) {
        for (unsigned i = 0; i < count; ++i)
            if (options[i] == 5) strcpy(values[i], "ptxas: too new");
        return 222;
    }
    *module = (void*)0x77ul;
    return 0;
}
int cuModuleGetFunction(void** function, void* module, const char* name) {
    *function = (void*)0x88ul;
    return refused("function") || module != (void*)0x77ul || strcmp(name, "flashckpt_digest") != 0 ? 500 : 0;
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void* function, int threads, size_t shared) {
    *blocks = function == (void*)0x88ul && threads == 256 && shared == 0 ? 2 : 0;
    return 0;
}
int cuMemsetD8Async(unsigned long long address, unsigned char byte, size_t bytes, void* stream) {
    tell("fill", bytes, (unsigned long)stream);
    if (refused("fill")) return 719;
    memset((void*)address, byte, bytes);
    return 0;
}
void emulate_digest(void* table, unsigned long entries, void* digests, unsigned blocks, unsigned long seed,
                    unsigned long* did);
int cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void* stream, void** parameters, void** extra) {
    tell("launch", gx, (unsigned long)stream);
    if (function != (void*)0x88ul || gy * gz * by * bz != 1 || bx != 256 || shared != 0 || extra != NULL) return 1;
    if (refused("launch")) return 719;
    emulate_digest(*(void**)parameters[0], *(unsigned long*)parameters[1], *(void**)parameters[2], gx, 1, NULL);
    if (refused("digests")) ((unsigned long*)*(void**)parameters[2])[20] ^= 1ul << 40;
    if (refused("copies")) (*(unsigned char**)((char*)*(void**)parameters[0] + 32 + 34 * 32 + 8))[70000] ^= 1;
    return 0;
}
int cuGetErrorName(int code, const char** name) {
    static char long_one[64 << 20];
    *name = code == 712 ? "ALREADY" : code == 710 ? "ASSERT" : code == 222 ? "UNSUPPORTED_PTX" : "FAULT";
    if (refused("memory for names")) *name = memset(long_one, 'x', sizeof long_one - 1);
    return 0;
}
int cuGetErrorString(int code, const char** text) { *text = code == 712 ? "registered already" : "no"; return 0; }
