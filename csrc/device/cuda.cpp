#include "device/cuda.h"

#include "device/context.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <vector>

namespace flashckpt {
namespace {

// The registered runs of a memory block, and the device with which they were registered. Unregistering in
// another device's context would create that context and take memory of a GPU that belongs to another rank.
struct Runs {
    int device = 0;
    std::vector<std::uint64_t> addresses;
};

struct Registered {
    std::mutex mutex;
    std::map<std::uint64_t, Runs> blocks; // by their first address

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

Error cuda_pci_address(int device, int (&address)[3]) {
    const Driver* driver = nullptr;
    if (Error error = need_driver(driver)) return error;
    CuDevice found = 0;
    CuResult code = driver->device_get(&found, device);
    constexpr int attributes[] = {kCuPciDomain, kCuPciBus, kCuPciDevice};
    for (int i = 0; i < 3 && code == kCuSuccess; ++i)
        code = driver->device_attribute(&address[i], attributes[i], found);
    return code == kCuSuccess ? Error{} : driver->failure(code, "name a device's PCI address");
}

Error cuda_register(std::uint64_t address, std::uint64_t num_bytes, int device,
                    std::uint64_t& num_registered) {
    num_registered = 0;
    const Driver* driver = nullptr;
    if (Error error = need_driver(driver)) return error;
    Entered entered;
    if (Error error = entered.enter(*driver, device)) return error;
    Runs runs{device, {}};
    CuResult refused = kCuSuccess;
    const std::uint64_t end = address + num_bytes;
    for (std::uint64_t begin = address, next = 0; begin < end; begin = next) {
        next = std::min(end, (begin / kRegisteredRun + 1) * kRegisteredRun);
        CuResult code =
            driver->host_register(reinterpret_cast<void*>(begin), next - begin, kCuRegisterPortable);
        if (code == kCuSuccess) {
            runs.addresses.push_back(begin);
            num_registered += next - begin;
        } else if (refused == kCuSuccess) {
            refused = code;
        }
    }
    if (!runs.addresses.empty()) {
        Registered& registered = Registered::get();
        std::lock_guard lock(registered.mutex);
        registered.blocks[address] = std::move(runs);
    }
    if (refused == kCuSuccess) return {};
    return driver->failure(refused, "page-lock " + std::to_string(num_bytes - num_registered) + " of " +
                                        std::to_string(num_bytes) + " bytes of host memory");
}

Error cuda_unregister(std::uint64_t address) {
    const Driver* driver = nullptr;
    if (Error error = need_driver(driver)) return error;
    Runs runs;
    {
        Registered& registered = Registered::get();
        std::lock_guard lock(registered.mutex);
        auto found = registered.blocks.find(address);
        if (found == registered.blocks.end())
            return value_error("no host memory was registered at this address");
        runs = std::move(found->second);
        registered.blocks.erase(found);
    }
    Entered entered;
    if (Error error = entered.enter(*driver, runs.device)) return error;
    CuResult refused = kCuSuccess;
    for (std::uint64_t run : runs.addresses) {
        CuResult code = driver->host_unregister(reinterpret_cast<void*>(run));
        if (refused == kCuSuccess) refused = code;
    }
    return refused == kCuSuccess ? Error{} : driver->failure(refused, "unregister host memory");
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
