#include "device/driver.h"

#include <dlfcn.h>

namespace flashckpt {
namespace {

template <class Function>
bool find(void* library, const char* name, Function& out, std::string& why) {
    out = reinterpret_cast<Function>(::dlsym(library, name));
    if (out != nullptr) return true;
    why = std::string("libcuda.so.1 has no ") + name;
    return false;
}

bool find_all(void* library, Driver& driver, std::string& why) {
    return find(library, "cuInit", driver.init, why) &&
           find(library, "cuDeviceGetCount", driver.device_count, why) &&
           find(library, "cuDeviceGet", driver.device_get, why) &&
           find(library, "cuDevicePrimaryCtxRetain", driver.primary_retain, why) &&
           find(library, "cuCtxSetCurrent", driver.context_set, why) &&
           find(library, "cuCtxGetCurrent", driver.context_get, why) &&
           find(library, "cuMemHostRegister_v2", driver.host_register, why) &&
           find(library, "cuMemHostUnregister", driver.host_unregister, why) &&
           find(library, "cuMemcpyDtoHAsync_v2", driver.copy_to_host, why) &&
           find(library, "cuThreadExchangeStreamCaptureMode", driver.exchange_capture_mode, why) &&
           find(library, "cuEventCreate", driver.event_create, why) &&
           find(library, "cuEventRecord", driver.event_record, why) &&
           find(library, "cuEventSynchronize", driver.event_synchronize, why) &&
           find(library, "cuEventElapsedTime", driver.event_elapsed, why) &&
           find(library, "cuStreamWaitEvent", driver.stream_wait_event, why) &&
           find(library, "cuStreamCreate", driver.stream_create, why) &&
           find(library, "cuStreamSynchronize", driver.stream_synchronize, why) &&
           find(library, "cuStreamIsCapturing", driver.stream_capturing, why) &&
           find(library, "cuStreamDestroy_v2", driver.stream_destroy, why) &&
           find(library, "cuMemAlloc_v2", driver.memory_take, why) &&
           find(library, "cuMemFree_v2", driver.memory_free, why) &&
           find(library, "cuMemcpyHtoDAsync_v2", driver.copy_to_device, why) &&
           find(library, "cuDeviceGetAttribute", driver.device_attribute, why) &&
           find(library, "cuModuleLoadDataEx", driver.module_load, why) &&
           find(library, "cuModuleGetFunction", driver.module_function, why) &&
           find(library, "cuOccupancyMaxActiveBlocksPerMultiprocessor", driver.occupancy, why) &&
           find(library, "cuLaunchKernel", driver.launch, why) &&
           find(library, "cuMemsetD8Async", driver.fill, why) &&
           find(library, "cuGetErrorName", driver.error_name, why) &&
           find(library, "cuGetErrorString", driver.error_text, why);
}

struct Loaded {
    Driver driver{};
    bool usable = false;
    std::string why;

    // The library stays loaded for the process's lifetime, since events may be queried until the end.
    Loaded() {
        void* library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
        if (library == nullptr) {
            why = "there is no libcuda.so.1 on this machine";
            return;
        }
        if (!find_all(library, driver, why)) return;
        if (CuResult code = driver.init(0); code != kCuSuccess) {
            why = driver.failure(code, "start the driver").message;
            return;
        }
        usable = true;
    }
};

} // namespace

const Driver* Driver::get(std::string& why) {
    static const Loaded* loaded = new Loaded;
    if (loaded->usable) return &loaded->driver;
    why = loaded->why;
    return nullptr;
}

Error Driver::failure(CuResult code, const std::string& what) const {
    const char* name = nullptr;
    const char* text = nullptr;
    error_name(code, &name);
    error_text(code, &text);
    std::string message = "CUDA refused to " + what + ": " + (name != nullptr ? name : std::to_string(code));
    if (text != nullptr) message += std::string(" (") + text + ")";
    return {Kind::device, code, message, ""};
}

} // namespace flashckpt
