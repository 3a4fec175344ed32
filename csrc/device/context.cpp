#include "device/context.h"

#include <map>
#include <mutex>

namespace flashckpt {
namespace {

// Retained once per device and never released: torch holds the same context for the process's lifetime.
Error primary_context(const Driver& driver, int ordinal, CuContext& out) {
    static auto* mutex = new std::mutex;
    static auto* contexts = new std::map<int, CuContext>;
    std::lock_guard lock(*mutex);
    auto found = contexts->find(ordinal);
    if (found != contexts->end()) {
        out = found->second;
        return {};
    }
    CuDevice device = 0;
    if (CuResult code = driver.device_get(&device, ordinal)) {
        return driver.failure(code, "find device " + std::to_string(ordinal));
    }
    if (CuResult code = driver.primary_retain(&out, device)) {
        return driver.failure(code, "open device " + std::to_string(ordinal));
    }
    contexts->emplace(ordinal, out);
    return {};
}

} // namespace

Error need_driver(const Driver*& driver) {
    std::string why;
    driver = Driver::get(why);
    return driver != nullptr ? Error{} : Error{Kind::device, 0, "CUDA cannot be used: " + why, ""};
}

Error Entered::enter(const Driver& driver, int device) {
    driver_ = &driver;
    // Before the context: opening a device is itself forbidden during another thread's capture.
    mode_ = kCuCaptureRelaxed;
    if (CuResult code = driver.exchange_capture_mode(&mode_)) {
        return driver.failure(code, "enter relaxed capture mode");
    }
    relaxed_ = true;
    CuContext wanted = nullptr;
    if (Error error = primary_context(driver, device, wanted)) return error;
    if (CuResult code = driver.context_get(&before_)) return driver.failure(code, "ask for the context");
    if (before_ == wanted) return {};
    if (CuResult code = driver.context_set(wanted)) return driver.failure(code, "enter the device's context");
    moved_ = true;
    return {};
}

Entered::~Entered() {
    if (moved_) driver_->context_set(before_);
    if (relaxed_) driver_->exchange_capture_mode(&mode_);
}

} // namespace flashckpt
