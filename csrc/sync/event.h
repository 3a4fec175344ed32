// Objects for which a seal can wait, behind opaque handles.
#pragma once

#include "sync/bell.h"

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

namespace flashckpt {

enum class Progress { pending, done, failed };

class Waitable {
  public:
    virtual ~Waitable() = default;
    // Called once when a wait begins; returns the occurrence to wait for.
    virtual std::uint64_t begin() = 0;
    // Returns the state of an occurrence; never blocks. The thread that changes the state rings the bell. On
    // `failed`, `why` has the reason.
    virtual Progress poll(std::uint64_t occurrence, std::string& why) = 0;
};

// Handles are numbers of a registry, not addresses, so that invalid handles are detected.
std::uint64_t enroll(std::shared_ptr<Waitable> waitable);
std::shared_ptr<Waitable> find_waitable(std::uint64_t handle); // null for an unknown handle
void retire(std::uint64_t handle);                             // waits that have begun continue

// An event that a thread of this process sets. A wait ends if the event is set at its start, or by the next
// `set`, even if a reset follows before the waiter runs.
class HostEvent : public Waitable {
  public:
    void set();
    void reset();
    bool query() const { return is_set_.load(std::memory_order_acquire); }
    bool wait(double timeout_s);

    std::uint64_t begin() override;
    Progress poll(std::uint64_t occurrence, std::string& why) override;

  private:
    std::atomic<bool> is_set_{false};
    std::atomic<std::uint64_t> sets_{0};
};

} // namespace flashckpt
