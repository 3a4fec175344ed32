#include "sync/sealer.h"

#include "checksum/xxh3.h"
#include "digest/digest.h"
#include "sync/pool.h"

#include <cstring>
#include <list>
#include <new>
#include <system_error>

namespace flashckpt {
namespace {

constexpr std::chrono::nanoseconds kForever = std::chrono::hours(24);

std::uint64_t* u64_at(std::uint64_t address) {
    return reinterpret_cast<std::uint64_t*>(address);
}

// The low sixteen bits are state and owner; FREE clears both and keeps the generation.
constexpr std::uint64_t free_word(std::uint64_t word) {
    return word & ~0xFFFFull;
}

bool exchange_word(std::uint64_t word, std::uint64_t expected, std::uint64_t desired) {
    return __atomic_compare_exchange_n(u64_at(word), &expected, desired, false, __ATOMIC_ACQ_REL,
                                       __ATOMIC_ACQUIRE);
}

bool exchange(const Seal& seal, std::uint64_t desired) {
    return exchange_word(seal.word, seal.expected, desired);
}

// Whether a slot is sealed, and if not, why.
struct Outcome {
    std::string why; // empty if sealed
    bool copied = true;
    bool frees = false; // the slot's word must still be freed
};

Outcome seal_slot(const Seal& seal) {
    for (const Landed& each : seal.landed) {
        std::uint64_t* entry = u64_at(seal.table) + each.entry;
        if (*entry != digest(reinterpret_cast<const std::uint8_t*>(each.address), each.num_bytes))
            *entry = kEmptyDigest;
    }
    for (std::uint64_t entry = 0; entry < seal.table_count; ++entry) {
        std::uint64_t value = __atomic_load_n(u64_at(seal.table) + entry, __ATOMIC_ACQUIRE);
        if (value == kEmptyDigest) {
            return {"digest " + std::to_string(entry) + " of " + std::to_string(seal.table_count) +
                        " was never taken, or its bytes differ from it",
                    true, true};
        }
    }
    // Check before the snapshot becomes visible: other ranks may release theirs because of a sealed snapshot.
    for (std::uint64_t i = 0; i < seal.held.size(); ++i) {
        std::uint64_t entry = seal.table_count - seal.held.size() + i;
        if (u64_at(seal.table)[entry] != seal.held[i])
            return {"leaf " + std::to_string(entry) + " is not what the region of constants holds", true,
                    true};
    }
    auto* record = reinterpret_cast<std::uint8_t*>(seal.record);
    Checksum first = xxh3_128(reinterpret_cast<const void*>(seal.metadata), seal.metadata_bytes);
    std::memcpy(record, first.data(), first.size());
    Checksum last = xxh3_128(record, kRecordBytes - kChecksumBytes);
    std::memcpy(record + kRecordBytes - kChecksumBytes, last.data(), last.size());
    // Readers that see SEALED must see image and record: the exchange releases, and the fence orders
    // streaming stores.
    settle_stores();
    if (exchange(seal, seal.desired)) return {};
    return {"the slot's word was changed by another while it was written"};
}

// An exception out of this thread would end the process, and waiters for an undecided seal would wait
// forever.
template <class Judge>
Outcome judged(bool copied, bool frees, Judge judge) noexcept {
    try {
        return judge();
    } catch (const std::bad_alloc&) {
        return {"out of memory", copied, frees}; // the short text needs no allocation
    }
}

} // namespace

struct Sealer::Pending {
    Seal seal;
    std::vector<std::pair<std::shared_ptr<Waitable>, std::uint64_t>> waits;
    std::string why; // why a wait failed

    Progress poll() noexcept {
        while (!waits.empty()) {
            Progress progress = ask(*waits.back().first, waits.back().second);
            if (progress != Progress::done) return progress;
            waits.pop_back();
        }
        return Progress::done;
    }

  private:
    Progress ask(Waitable& waitable, std::uint64_t occurrence) noexcept {
        try {
            return waitable.poll(occurrence, why);
        } catch (const std::bad_alloc&) {
            why = "out of memory"; // the short text needs no allocation
            return Progress::failed;
        }
    }
};

// Guarded by the bell's lock, except `pending`, which only the thread uses.
struct Sealer::State {
    // Lists, because the thread moves items between them without allocating memory.
    std::list<std::unique_ptr<Pending>> incoming;
    std::list<std::unique_ptr<Pending>> pending;
    std::vector<SealFailure> failures;
    // Seals that were confirmed while their copies ran.
    struct Confirmed {
        std::uint64_t word, unconfirmed, sealed;
    };
    std::vector<Confirmed> confirmed;
    std::uint64_t submitted = 0;
    std::uint64_t decided = 0;
    std::uint64_t forks = 0;
    bool closing = false;
    bool serving = false; // until the thread has decided all remaining seals
    std::thread thread;

    // Frees with the lock held, so that a thread that sees the free slot also finds the reason.
    void decide(const Seal& seal, Outcome outcome) {
        Bell& bell = Bell::get();
        std::lock_guard lock(bell.mutex);
        if (outcome.frees && !exchange(seal, free_word(seal.expected)))
            outcome = judged(outcome.copied, false, [&] {
                return Outcome{outcome.why + "; and the slot's word was changed by another", outcome.copied};
            });
        for (auto each = confirmed.begin(); each != confirmed.end(); ++each) {
            if (each->word != seal.word || each->unconfirmed != seal.desired) continue;
            // Fails for a seal that was refused: its slot is free.
            exchange_word(each->word, each->unconfirmed, each->sealed);
            confirmed.erase(each);
            break;
        }
        if (!outcome.why.empty()) // `submit` has reserved the memory
            failures.push_back({seal.word, std::move(outcome.why), outcome.copied});
        ++decided;
        // Last, so that a thread that sees the decision also finds the reason of a failure.
        if (seal.on_done_word != 0) __atomic_fetch_add(u64_at(seal.on_done_word), 1, __ATOMIC_ACQ_REL);
        bell.ring();
    }

    // Seals all that are ready.
    void go_through() {
        for (auto at = pending.begin(); at != pending.end();) {
            Pending& item = **at;
            Progress progress = item.poll();
            if (progress == Progress::pending) {
                ++at;
                continue;
            }
            bool done = progress == Progress::done;
            decide(item.seal, judged(done, true, [&] {
                       return done ? seal_slot(item.seal) : Outcome{item.why, false, true};
                   }));
            at = pending.erase(at);
        }
    }
};

Sealer::Sealer() : state_(new State) {
    std::lock_guard lock(Bell::get().mutex);
    state_->forks = Bell::get().forks();
}

Sealer::~Sealer() {
    close();
    std::lock_guard lock(Bell::get().mutex);
    // Leak a state from the parent: its thread's handle must be neither joined nor destroyed here.
    if (state_->forks == Bell::get().forks()) delete state_;
}

// A child starts without seals: the parent's thread seals what the parent submitted.
Sealer::State& Sealer::here() {
    std::uint64_t forks = Bell::get().forks();
    if (state_->forks != forks) {
        state_ = new State;
        state_->forks = forks;
    }
    return *state_;
}

Error Sealer::submit(Seal seal) {
    auto item = std::make_unique<Pending>();
    for (std::uint64_t handle : seal.waits) {
        std::shared_ptr<Waitable> waitable = find_waitable(handle);
        if (waitable == nullptr) return value_error("no event has the handle " + std::to_string(handle));
        std::uint64_t occurrence = waitable->begin();
        item->waits.emplace_back(std::move(waitable), occurrence);
    }
    item->seal = std::move(seal);
    State* at_once = nullptr;
    if (Error error = enqueue(item, at_once)) return error;
    if (at_once != nullptr)
        at_once->decide(item->seal, judged(true, true, [&] { return seal_slot(item->seal); }));
    return {};
}

Error Sealer::enqueue(std::unique_ptr<Pending>& item, State*& at_once) {
    Bell& bell = Bell::get();
    std::lock_guard lock(bell.mutex);
    State& state = here();
    if (state.closing) return value_error("the sealer is closed");
    state.failures.reserve(state.failures.size() + (state.submitted - state.decided) + 1);
    if (item->waits.empty() && state.decided == state.submitted) {
        ++state.submitted;
        at_once = &state;
        return {};
    }
    if (!state.thread.joinable()) {
        SignalsBlocked blocked;
        try {
            state.thread = std::thread(serve, std::ref(state));
            state.serving = true;
        } catch (const std::system_error& refused) {
            return os_error(refused.code().value(), "start the sealing thread");
        }
    }
    state.incoming.push_back(std::move(item));
    ++state.submitted;
    bell.ring();
    return {};
}

void Sealer::serve(State& state) {
    name_this_thread("flashckpt-seal");
    Bell& bell = Bell::get();
    std::unique_lock lock(bell.mutex);
    for (;;) {
        std::uint64_t rings = bell.rings();
        bool closing = state.closing;
        state.pending.splice(state.pending.end(), state.incoming);
        lock.unlock();
        state.go_through();
        if (closing) break;
        lock.lock();
        bell.wait(lock, kForever, [&] { return bell.rings() != rings; });
    }
    for (auto& item : state.pending) {
        state.decide(item->seal, judged(false, false, [] {
                         return Outcome{"the sealer was closed before the copies had ended", false};
                     }));
    }
    state.pending.clear();
    lock.lock();
    state.serving = false;
    bell.ring();
}

bool Sealer::confirm(std::uint64_t word, std::uint64_t writing, std::uint64_t unconfirmed,
                     std::uint64_t sealed) {
    std::lock_guard lock(Bell::get().mutex);
    State& state = here();
    // Reserved first: after the word was seen, nothing may fail.
    state.confirmed.reserve(state.confirmed.size() + 1);
    if (exchange_word(word, unconfirmed, sealed)) return true;
    if (__atomic_load_n(u64_at(word), __ATOMIC_ACQUIRE) != writing)
        return exchange_word(word, unconfirmed, sealed); // its copies have ended in between
    // `decide` takes the lock after the word became `unconfirmed`, so it finds this entry.
    state.confirmed.push_back({word, unconfirmed, sealed});
    return true;
}

bool Sealer::drain(double timeout_s) {
    Bell& bell = Bell::get();
    std::unique_lock lock(bell.mutex);
    State& state = here();
    std::uint64_t goal = state.submitted;
    return bell.wait(lock, bounded(timeout_s), [&] { return state.decided >= goal; });
}

void Sealer::close() {
    std::thread ended;
    {
        Bell& bell = Bell::get();
        std::unique_lock lock(bell.mutex);
        State& state = here();
        state.closing = true;
        bell.ring();
        // Two concurrent calls of `close` both return when the sealer is closed.
        while (state.serving)
            bell.wait(lock, kForever, [&] { return !state.serving; });
        ended = std::move(state.thread);
    }
    if (ended.joinable()) ended.join();
}

std::vector<SealFailure> Sealer::failures() {
    std::lock_guard lock(Bell::get().mutex);
    State& state = here();
    std::vector<SealFailure> taken;
    taken.reserve(state.submitted - state.decided); // memory for seals that may still fail
    taken.swap(state.failures);
    return taken;
}

} // namespace flashckpt
