#include "device/copies.h"

#include "device/context.h"
#include "device/cuda.h"
#include "sync/pool.h"

#include <algorithm>
#include <deque>
#include <map>
#include <new>
#include <system_error>
#include <thread>

namespace flashckpt {
namespace {

// Limits of a wave, the copies enqueued between two marks; at most two waves are enqueued, beside a few
// marks. Limited in pieces, since a stream takes about a thousand operations, and in bytes: with one hardware
// queue (CUDA_DEVICE_MAX_CONNECTIONS=1, as Megatron sets it) the loop's kernels wait for all enqueued copies,
// and 128 MiB take 2.5 ms at 52 GB/s.
constexpr std::size_t kWavePieces = 256;
constexpr std::uint64_t kWaveBytes = 64 << 20;
// Failures are read soon or never. Jobs older than the kept failures all count as failed.
constexpr std::size_t kFailuresKept = 64;
constexpr std::chrono::nanoseconds kForever = std::chrono::hours(24);

using Failures = std::map<std::uint64_t, Error>; // by ticket

// The wave that is being enqueued.
struct Wave {
    std::size_t number = 0;
    std::size_t pieces = 0;
    std::uint64_t bytes = 0;
};

struct Job {
    std::uint64_t ticket = 0;
    CopyJob copies;
    Failures::node_type failure; // made at submission, so that the thread can report without memory
};

Failures::node_type make_failure(std::uint64_t ticket) {
    Failures made;
    return made.extract(made.try_emplace(ticket).first);
}

// An exception out of this thread would end the process.
template <class Work>
Error without_throwing(Work work) {
    try {
        return work();
    } catch (const std::bad_alloc&) {
        return {Kind::device, 0, "out of memory", ""}; // the short text needs no allocation
    }
}

} // namespace

// Guarded by the bell's lock, except members that are set only at construction.
struct DeviceCopies::State {
    const Driver* driver = nullptr;
    CuStream stream = nullptr;
    int device = 0;
    std::uint64_t piece_bytes = 0;
    CuEvent first = nullptr; // recorded after the first copies of the running job
    CuEvent last = nullptr;
    CuEvent waves[2] = {nullptr, nullptr};
    std::uint64_t forks = 0;

    std::deque<Job> jobs;
    std::uint64_t submitted = 0;
    std::uint64_t enqueued = 0; // tickets up to this one have had their first copies enqueued, or have failed
    std::uint64_t finished = 0;
    Failures failures;
    std::uint64_t forgotten = 0; // failures of jobs up to this ticket are no longer known
    bool closing = false;
    bool running = false;

    Error check(CuResult code, const char* what) const {
        return code == kCuSuccess ? Error{} : driver->failure(code, what);
    }

    // Never destroyed: a thread may wait for a job's last event until the process ends.
    Error make_stream() {
        Entered entered;
        if (Error error = entered.enter(*driver, device)) return error;
        CuResult made = driver->stream_create(&stream, kCuStreamNonBlocking);
        if (Error error = check(made, "make a stream")) return error;
        for (CuEvent* event : {&first, &last, &waves[0], &waves[1]}) {
            CuResult code = driver->event_create(event, kCuEventBlockingSync | kCuEventNoTiming);
            if (Error error = check(code, "make an event")) return error;
        }
        return {};
    }

    Error enqueue(const CopyJob& job, std::size_t from, std::size_t to, Wave& wave) const {
        for (std::size_t copy = from; copy < to; ++copy) {
            std::uint64_t count = 0;
            for (std::uint64_t done = 0; done < job.sizes[copy]; done += count) {
                std::uint64_t host = job.destinations[copy] + done;
                count = std::min(piece_bytes - host % piece_bytes, job.sizes[copy] - done);
                bool is_full = wave.pieces == kWavePieces || wave.bytes + count > kWaveBytes;
                if (Error error = is_full ? next_wave(wave) : Error{}) return error;
                CuResult code = driver->copy_to_host(reinterpret_cast<void*>(host), job.sources[copy] + done,
                                                     count, stream);
                if (Error error = check(code, "copy to host memory")) return error;
                ++wave.pieces;
                wave.bytes += count;
            }
        }
        return {};
    }

    // Ends a wave, and waits for the one before it.
    Error next_wave(Wave& wave) const {
        wave = {wave.number + 1};
        if (Error error = check(driver->event_record(waves[wave.number % 2], stream), "mark a stream"))
            return error;
        if (wave.number < 2) return {};
        return check(driver->event_synchronize(waves[(wave.number + 1) % 2]), "wait for copies");
    }

    Error run(const Job& job) {
        Entered entered;
        if (Error error = entered.enter(*driver, device)) return error;
        Error error = without_throwing([&] { return copy(job); });
        // Enqueued copies still write: the memory must not be released before they end.
        if (error) driver->stream_synchronize(stream);
        return error;
    }

    Error copy(const Job& job) {
        Wave wave;
        Error error = enqueue(job.copies, 0, job.copies.num_first, wave);
        if (!error) error = check(driver->event_record(first, stream), "mark a stream");
        if (!error) {
            tell_enqueued(job.ticket);
            error = enqueue(job.copies, job.copies.num_first, job.copies.sizes.size(), wave);
        }
        if (!error) error = check(driver->event_record(last, stream), "mark a stream");
        return error ? error : check(driver->event_synchronize(last), "wait for copies");
    }

    void tell_enqueued(std::uint64_t ticket) {
        std::lock_guard lock(Bell::get().mutex);
        enqueued = ticket;
        Bell::get().ring();
    }
};

Error DeviceCopies::make(int device, std::uint64_t piece_bytes, std::shared_ptr<DeviceCopies>& out) {
    if (piece_bytes == 0 || kRegisteredRun % piece_bytes != 0)
        return value_error("piece_bytes must divide 1 GiB");
    auto state = std::make_shared<State>();
    if (Error error = need_driver(state->driver)) return error;
    state->device = device;
    state->piece_bytes = piece_bytes;
    if (Error error = state->make_stream()) return error;
    {
        std::lock_guard lock(Bell::get().mutex);
        state->forks = Bell::get().forks();
    }
    out = std::shared_ptr<DeviceCopies>(new DeviceCopies(std::move(state)));
    return {};
}

DeviceCopies::~DeviceCopies() {
    close();
}

bool DeviceCopies::is_forked() const {
    return state_->forks != Bell::get().forks();
}

Error DeviceCopies::submit(CopyJob job, std::uint64_t after, std::uint64_t& ticket) {
    if (job.sources.size() != job.sizes.size() || job.destinations.size() != job.sizes.size()) {
        return value_error("sources, destinations and sizes differ in length");
    }
    if (job.num_first > job.sizes.size()) return value_error("there are fewer copies than first ones");
    {
        std::lock_guard lock(Bell::get().mutex);
        if (is_forked()) return value_error("these copies are another process's, which has forked this one");
        if (state_->closing) return value_error("these copies were closed");
    }
    // Wait on the event now: it may be recorded again before the thread handles the job.
    if (Error error = wait_for(after)) return error;
    std::lock_guard lock(Bell::get().mutex);
    if (!state_->running) {
        SignalsBlocked blocked;
        try {
            std::thread(serve, state_).detach();
        } catch (const std::system_error& refused) {
            return os_error(refused.code().value(), "start the copying thread");
        }
        state_->running = true;
    }
    state_->jobs.push_back({state_->submitted + 1, std::move(job), make_failure(state_->submitted + 1)});
    ticket = ++state_->submitted;
    Bell::get().ring();
    return {};
}

Error DeviceCopies::wait_for(std::uint64_t event) {
    if (event == 0) return {};
    Entered entered;
    if (Error error = entered.enter(*state_->driver, state_->device)) return error;
    CuResult code = state_->driver->stream_wait_event(state_->stream, reinterpret_cast<CuEvent>(event), 0);
    return state_->check(code, "let copies wait for the device");
}

void DeviceCopies::serve(std::shared_ptr<State> state) {
    name_this_thread("flashckpt-copy");
    Bell& bell = Bell::get();
    std::unique_lock lock(bell.mutex);
    for (;;) {
        bell.wait(lock, kForever, [&] { return state->closing || !state->jobs.empty(); });
        if (state->jobs.empty()) {
            if (state->closing) break;
            continue;
        }
        Job job = std::move(state->jobs.front());
        state->jobs.pop_front();
        lock.unlock();
        Error error = without_throwing([&] { return state->run(job); });
        lock.lock();
        if (error) {
            job.failure.mapped() = std::move(error);
            state->failures.insert(std::move(job.failure));
            if (state->failures.size() > kFailuresKept) {
                state->forgotten = state->failures.begin()->first;
                state->failures.erase(state->failures.begin());
            }
        }
        state->enqueued = state->finished = job.ticket;
        bell.ring();
    }
    state->running = false;
    bell.ring();
}

Error DeviceCopies::failure(std::uint64_t ticket) const {
    auto found = state_->failures.find(ticket);
    if (found != state_->failures.end()) return found->second;
    if (ticket == 0 || ticket > state_->forgotten) return {}; // 0: nothing had been submitted
    return {Kind::device, 0, "whether copies so old have failed is not known any more", ""};
}

Error DeviceCopies::hold(std::uint64_t ticket, const std::uint64_t* streams, std::size_t num_streams) {
    Bell& bell = Bell::get();
    {
        std::unique_lock lock(bell.mutex);
        if (is_forked()) return value_error("these copies are another process's, which has forked this one");
        if (ticket > state_->submitted) return value_error("no copies have this ticket");
        while (state_->enqueued < ticket)
            bell.wait(lock, kForever, [&] { return state_->enqueued >= ticket; });
        // Do not wait for an ended job: the event may belong to a later one.
        if (state_->finished >= ticket) return {};
    }
    Entered entered;
    if (Error error = entered.enter(*state_->driver, state_->device)) return error;
    for (std::size_t i = 0; i < num_streams; ++i) {
        auto* stream = reinterpret_cast<CuStream>(streams[i]);
        CuResult code = state_->driver->stream_wait_event(stream, state_->first, 0);
        if (Error error = state_->check(code, "let a stream wait for copies")) return error;
    }
    return {};
}

Error DeviceCopies::wait_first(std::uint64_t ticket) {
    Bell& bell = Bell::get();
    {
        std::unique_lock lock(bell.mutex);
        if (is_forked() || ticket > state_->submitted) return value_error("no copies have this ticket");
        while (state_->enqueued < ticket)
            bell.wait(lock, kForever, [&] { return state_->enqueued >= ticket; });
        if (state_->finished >= ticket) return failure(ticket);
    }
    Entered entered;
    if (Error error = entered.enter(*state_->driver, state_->device)) return error;
    return state_->check(state_->driver->event_synchronize(state_->first), "wait for copies");
}

Error DeviceCopies::wait(std::uint64_t ticket) {
    Bell& bell = Bell::get();
    std::unique_lock lock(bell.mutex);
    if (is_forked() || ticket > state_->submitted) return value_error("no copies have this ticket");
    while (state_->finished < ticket)
        bell.wait(lock, kForever, [&] { return state_->finished >= ticket; });
    return failure(ticket);
}

void DeviceCopies::close() {
    Bell& bell = Bell::get();
    std::unique_lock lock(bell.mutex);
    if (is_forked()) return; // the thread is the parent's
    state_->closing = true;
    bell.ring();
    while (state_->running)
        bell.wait(lock, kForever, [&] { return !state_->running; });
}

std::uint64_t DeviceCopies::begin() {
    std::lock_guard lock(Bell::get().mutex);
    return state_->submitted;
}

Progress DeviceCopies::poll(std::uint64_t ticket, std::string& why) {
    std::lock_guard lock(Bell::get().mutex);
    if (state_->finished < ticket) return Progress::pending;
    Error error = failure(ticket);
    if (!error) return Progress::done;
    why = error.message;
    return Progress::failed;
}

} // namespace flashckpt
