// Copies from a device to host memory, enqueued on a stream and by a thread of their own: a stream takes
// about a thousand operations, and blocks whoever enqueues the next. The thread that asks for copies enqueues
// none.
#pragma once

#include "base/error.h"
#include "sync/event.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace flashckpt {

// Absolute addresses and bytes, in the order in which they are made. The `num_first` first ones are those
// that `hold` and `wait_first` are about.
struct CopyJob {
    std::vector<std::uint64_t> sources;
    std::vector<std::uint64_t> destinations;
    std::vector<std::uint64_t> sizes;
    std::size_t num_first = 0;
};

// As a Waitable: a wait is for all that was submitted before it began, and fails where the newest of that
// failed. Memory on both sides must stay until then. Whatever is told of a job, done or failed: nothing of it
// is still written afterwards.
class DeviceCopies : public Waitable {
  public:
    // The stream is none of torch's: those are lent to several users, one of whom may capture a graph on it.
    // Copies are cut at multiples of `piece_bytes` of the host address. It must divide kRegisteredRun: then
    // no piece spans two runs of registered memory, nor registered memory and memory that is not, which the
    // driver refuses.
    static Error make(int device, std::uint64_t piece_bytes, std::shared_ptr<DeviceCopies>& out);
    ~DeviceCopies() override;

    // Returns at once. The copies begin when `after`, an event as it is recorded now, has happened (0: at
    // once). Jobs go in order and are counted from 1.
    Error submit(CopyJob job, std::uint64_t after, std::uint64_t& ticket);
    // Work that is enqueued on these streams from now on waits for a job's first copies. Returns when these
    // are enqueued: when all but the last 128 MiB (or 512 pieces) of them are made. Holds nothing where the
    // job has failed: nothing is read any more.
    Error hold(std::uint64_t ticket, const std::uint64_t* streams, std::size_t num_streams);
    // Until the first copies are made, or all of them; the job's failure.
    Error wait_first(std::uint64_t ticket);
    Error wait(std::uint64_t ticket);
    // Jobs that were submitted are done; then the thread ends.
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
