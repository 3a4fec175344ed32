// Things a seal can wait for, behind opaque handles.
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
    // Called once when a wait begins; what it returns names the occurrence that is waited for.
    virtual std::uint64_t begin() = 0;
    // Never blocks; whoever makes it happen rings the bell. On `failed`, `why` says what happened.
    virtual Progress poll(std::uint64_t occurrence, std::string& why) = 0;
};

// Handles are numbers of a registry, not addresses: one that is stale or made up is found out.
std::uint64_t enroll(std::shared_ptr<Waitable> waitable);
std::shared_ptr<Waitable> find_waitable(std::uint64_t handle); // null if there is none
void retire(std::uint64_t handle);                             // waits that began go on

// Set by a thread of this process. A wait is for the state at its begin, or else for the next `set`: a reset
// between that and the moment a waiter looks loses nothing.
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
