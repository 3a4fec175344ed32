#include "sync/event.h"

#include <unordered_map>

namespace flashckpt {
namespace {

// Guarded by the bell's lock. Never destroyed, since native threads may outlive static objects.
struct Registry {
    std::unordered_map<std::uint64_t, std::shared_ptr<Waitable>> waitables;
    std::uint64_t next = 1;
};

Registry& registry() {
    static auto* made = new Registry;
    return *made;
}

} // namespace

std::uint64_t enroll(std::shared_ptr<Waitable> waitable) {
    std::lock_guard lock(Bell::get().mutex);
    std::uint64_t handle = registry().next++;
    registry().waitables.emplace(handle, std::move(waitable));
    return handle;
}

std::shared_ptr<Waitable> find_waitable(std::uint64_t handle) {
    std::lock_guard lock(Bell::get().mutex);
    auto found = registry().waitables.find(handle);
    return found == registry().waitables.end() ? nullptr : found->second;
}

void retire(std::uint64_t handle) {
    std::shared_ptr<Waitable> last; // destroyed after the lock is released
    std::lock_guard lock(Bell::get().mutex);
    auto found = registry().waitables.find(handle);
    if (found == registry().waitables.end()) return;
    last = std::move(found->second);
    registry().waitables.erase(found);
}

void HostEvent::set() {
    Bell& bell = Bell::get();
    std::lock_guard lock(bell.mutex);
    is_set_.store(true, std::memory_order_release);
    sets_.fetch_add(1, std::memory_order_release);
    bell.ring();
}

void HostEvent::reset() {
    std::lock_guard lock(Bell::get().mutex);
    is_set_.store(false, std::memory_order_release);
}

bool HostEvent::wait(double timeout_s) {
    Bell& bell = Bell::get();
    std::unique_lock lock(bell.mutex);
    return bell.wait(lock, bounded(timeout_s), [&] { return is_set_.load(std::memory_order_acquire); });
}

std::uint64_t HostEvent::begin() {
    std::lock_guard lock(Bell::get().mutex);
    return is_set_.load(std::memory_order_acquire) ? 0 : sets_.load(std::memory_order_acquire) + 1;
}

Progress HostEvent::poll(std::uint64_t occurrence, std::string&) {
    return sets_.load(std::memory_order_acquire) >= occurrence ? Progress::done : Progress::pending;
}

} // namespace flashckpt
