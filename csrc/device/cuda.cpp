#include "device/cuda.h"

#include "device/context.h"

#include <map>
#include <mutex>

namespace flashckpt {
namespace {

// The device that memory was registered with: undoing it in another's context would make one there, and a
// rank must take no memory of a GPU that is another rank's.
struct Registered {
    std::mutex mutex;
    std::map<std::uint64_t, int> devices;

    static Registered& get() {
        static auto* made = new Registered;
        return *made;
    }
};

} // namespace

bool cuda_available() {
    const Driver* driver = nullptr;
    if (need_driver(driver)) return false;
    int count = 0;
    return driver->device_count(&count) == kCuSuccess && count > 0;
}

Error cuda_register(std::uint64_t address, std::uint64_t num_bytes, int device) {
    const Driver* driver = nullptr;
    if (Error error = need_driver(driver)) return error;
    Entered entered;
    if (Error error = entered.enter(*driver, device)) return error;
    CuResult code = driver->host_register(reinterpret_cast<void*>(address), num_bytes, kCuRegisterPortable);
    if (code != kCuSuccess) {
        return driver->failure(code, "register " + std::to_string(num_bytes) + " bytes of host memory");
    }
    Registered& registered = Registered::get();
    std::lock_guard lock(registered.mutex);
    registered.devices[address] = device;
    return {};
}

Error cuda_unregister(std::uint64_t address) {
    const Driver* driver = nullptr;
    if (Error error = need_driver(driver)) return error;
    int device = 0;
    {
        Registered& registered = Registered::get();
        std::lock_guard lock(registered.mutex);
        auto found = registered.devices.find(address);
        if (found == registered.devices.end())
            return value_error("no host memory was registered at this address");
        device = found->second;
        registered.devices.erase(found);
    }
    Entered entered;
    if (Error error = entered.enter(*driver, device)) return error;
    CuResult code = driver->host_unregister(reinterpret_cast<void*>(address));
    return code == kCuSuccess ? Error{} : driver->failure(code, "unregister host memory");
}

Error cuda_capturing(const std::uint64_t* streams, std::size_t num_streams, int device, bool& capturing) {
    const Driver* driver = nullptr;
    if (Error error = need_driver(driver)) return error;
    Entered entered;
    if (Error error = entered.enter(*driver, device)) return error;
    capturing = false;
    for (std::size_t i = 0; i < num_streams && !capturing; ++i) {
        int status = 0;
        CuResult code = driver->stream_capturing(reinterpret_cast<CuStream>(streams[i]), &status);
        if (code != kCuSuccess && code != kCuCaptureImplicit) {
            return driver->failure(code, "tell whether a graph is being captured");
        }
        capturing = code == kCuCaptureImplicit || status != 0;
    }
    return {};
}

std::optional<double> cuda_elapsed_s(std::uint64_t start, std::uint64_t end, int device) {
    const Driver* driver = nullptr;
    if (need_driver(driver)) return std::nullopt;
    Entered entered;
    if (entered.enter(*driver, device)) return std::nullopt;
    float milliseconds = 0;
    CuResult code = driver->event_elapsed(&milliseconds, reinterpret_cast<CuEvent>(start),
                                          reinterpret_cast<CuEvent>(end));
    if (code != kCuSuccess) return std::nullopt;
    return milliseconds / 1e3;
}

} // namespace flashckpt
