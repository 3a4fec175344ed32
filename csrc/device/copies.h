// Copies from a device to host memory. A separate thread enqueues them on a separate stream: a stream takes
// about a thousand operations and then blocks the enqueuing thread, which must not be the training thread.
#pragma once

#include "base/error.h"
#include "sync/event.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace flashckpt {

// Addresses and bytes, in the order of copying. `hold` and `wait_first` concern the first `num_first` copies.
struct CopyJob {
    std::vector<std::uint64_t> sources;
    std::vector<std::uint64_t> destinations;
    std::vector<std::uint64_t> sizes;
    std::size_t num_first = 0;
};

// As a Waitable: a wait is for all jobs submitted before it began, and fails if the newest of them failed.
// Memory on both sides must stay mapped until then. Once a job is reported as done or failed, it writes
// nothing more.
class DeviceCopies : public Waitable {
  public:
    // Uses its own stream: torch shares its streams between users, and one may capture a graph. Copies
    // are cut at multiples of `piece_bytes` of the host address. It must divide kRegisteredRun, so that no
    // piece spans two runs of registered memory or registered and other memory, which the driver refuses.
    static Error make(int device, std::uint64_t piece_bytes, std::shared_ptr<DeviceCopies>& out);
    ~DeviceCopies() override;

    // Returns at once. The copies begin after the current record of the event `after` (0: at once). Jobs run
    // in order; tickets count from 1.
    Error submit(CopyJob job, std::uint64_t after, std::uint64_t& ticket);
    // Makes work enqueued on these streams from now on wait for a job's first copies. Returns when these are
    // enqueued, which means that all but the last 128 MiB (or 512 pieces) are done. Does not hold the streams
    // if the job has failed, since it reads nothing any more.
    Error hold(std::uint64_t ticket, const std::uint64_t* streams, std::size_t num_streams);
    // Waits until the first copies, or all of them, are done. Returns the job's failure.
    Error wait_first(std::uint64_t ticket);
    Error wait(std::uint64_t ticket);
    // Finishes all submitted jobs, then ends the thread.
    void close();

    std::uint64_t begin() override;
    Progress poll(std::uint64_t ticket, std::string& why) override;

  private:
    struct State;
    explicit DeviceCopies(std::shared_ptr<State> state) : state_(std::move(state)) {}
    static void serve(std::shared_ptr<State> state);
    Error wait_for(std::uint64_t event);
    bool is_forked() const; // needs the bell's lock
    Error failure(std::uint64_t ticket) const;

    std::shared_ptr<State> state_;
};

} // namespace flashckpt
