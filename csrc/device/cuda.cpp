#include "device/cuda.h"

#include "device/context.h"
#include "sync/event.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

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

class CudaEvent : public Waitable {
  public:
    CudaEvent(const Driver& driver, CuEvent event, int device)
        : driver_(driver), event_(event), device_(device) {}

    std::uint64_t begin() override { return 0; }

    Progress poll(std::uint64_t, std::string& why) override {
        Entered entered;
        if (Error error = entered.enter(driver_, device_)) {
            why = error.message;
            return Progress::failed;
        }
        CuResult code = driver_.event_query(event_);
        if (code == kCuSuccess) return Progress::done;
        if (code == kCuNotReady) return Progress::pending;
        why = driver_.failure(code, "tell whether the copies have ended").message;
        return Progress::failed;
    }

    bool must_be_polled() const override { return true; }

  private:
    const Driver& driver_;
    CuEvent event_;
    int device_;
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

Error cuda_event_handle(std::uint64_t event, int device, std::uint64_t& handle) {
    const Driver* driver = nullptr;
    if (Error error = need_driver(driver)) return error;
    static auto* mutex = new std::mutex;
    static auto* handles = new std::map<std::pair<std::uint64_t, int>, std::uint64_t>;
    std::lock_guard lock(*mutex);
    auto found = handles->find({event, device});
    if (found == handles->end()) {
        auto waitable = std::make_shared<CudaEvent>(*driver, reinterpret_cast<CuEvent>(event), device);
        found = handles->emplace(std::pair{event, device}, enroll(std::move(waitable))).first;
    }
    handle = found->second;
    return {};
}

Error cuda_copy_to_host(std::uint64_t stream, const std::uint64_t* sources, const std::uint64_t* destinations,
                        const std::uint64_t* sizes, std::size_t num_copies, std::uint64_t piece_bytes,
                        int device) {
    if (piece_bytes == 0) return value_error("piece_bytes must not be 0");
    const Driver* driver = nullptr;
    if (Error error = need_driver(driver)) return error;
    Entered entered;
    if (Error error = entered.enter(*driver, device)) return error;
    for (std::size_t copy = 0; copy < num_copies; ++copy) {
        for (std::uint64_t done = 0; done < sizes[copy]; done += piece_bytes) {
            std::uint64_t count = std::min(piece_bytes, sizes[copy] - done);
            CuResult code =
                driver->copy_to_host(reinterpret_cast<void*>(destinations[copy] + done), sources[copy] + done,
                                     count, reinterpret_cast<CuStream>(stream));
            if (code != kCuSuccess) {
                return driver->failure(code, "copy " + std::to_string(count) + " bytes to host memory");
            }
        }
    }
    return {};
}

} // namespace flashckpt
