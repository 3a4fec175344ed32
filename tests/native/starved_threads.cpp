// Native threads without memory, and work that throws on them: the process continues and gets the error. Prints failures only.
#include "device/copies.h"
#include "device/driver.h"
#include "digest/definition.h"
#include "sync/pool.h"
#include "sync/sealer.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <pthread.h>
#include <stdexcept>
#include <string>
#include <thread>

using namespace flashckpt;

namespace {

std::atomic<const char*> starved{nullptr}; // the name of the threads that get no memory
thread_local int left = -1;                // so many times memory is to be had on this thread; -1: always

bool refuses() {
    if (left == 0) return true;
    if (left > 0) --left;
    const char* name = starved.load();
    char own[16] = {};
    return name != nullptr && pthread_getname_np(pthread_self(), own, sizeof(own)) == 0 &&
           std::strcmp(own, name) == 0;
}

void expect(bool holds, const char* what) {
    if (!holds) std::printf("%s\n", what);
}

// Fails with a reason that needs memory.
struct Failing : Waitable {
    std::uint64_t begin() override { return 0; }
    Progress poll(std::uint64_t, std::string& why) override {
        why = std::string(100, 'x');
        return Progress::failed;
    }
};

struct Slot {
    std::uint64_t word = 0x10002;
    std::uint64_t done = 0;
    std::uint64_t digest = kEmptyDigest;
    std::uint8_t record[kRecordBytes] = {};

    Seal seal(std::uint64_t handle) {
        Seal seal;
        if (handle != 0) seal.waits.push_back(handle);
        seal.word = reinterpret_cast<std::uint64_t>(&word);
        seal.expected = word;
        seal.desired = 0x10003;
        seal.record = reinterpret_cast<std::uint64_t>(record);
        seal.table = reinterpret_cast<std::uint64_t>(&digest);
        seal.table_count = 1;
        seal.on_done_word = reinterpret_cast<std::uint64_t>(&done);
        return seal;
    }
    bool is_given_back() const { return word == 0x10000 && done == 1; }
};

void seal_without_memory() {
    Sealer sealer;
    auto event = std::make_shared<HostEvent>();
    std::uint64_t set = enroll(event), fails = enroll(std::make_shared<Failing>());
    Slot undigested, failed, waiting;
    sealer.submit(undigested.seal(set));
    sealer.submit(failed.seal(fails));
    starved = "flashckpt-seal";
    event->set();
    expect(sealer.drain(60), "a seal was never decided");
    starved = nullptr;
    expect(undigested.is_given_back() && failed.is_given_back(), "a slot was not given back");
    for (const SealFailure& failure : sealer.failures())
        expect(!failure.why.empty(), "a failure without a reason");
    event->reset();
    sealer.submit(waiting.seal(set));
    starved = "flashckpt-seal";
    sealer.close();
    starved = nullptr;
    expect(waiting.done == 1 && sealer.failures().size() == 1, "what was given up is no failure");
}

void seal_here_without_memory() {
    for (int count = 0; count < 20; ++count) {
        Sealer sealer;
        Slot slot;
        Seal seal = slot.seal(0);
        left = count;
        bool refused = false;
        try {
            sealer.submit(std::move(seal));
        } catch (const std::bad_alloc&) {
            refused = true;
        }
        left = -1;
        expect(sealer.drain(5), "a seal that was refused for want of memory is waited for");
        expect(refused != slot.is_given_back(), "a slot was not given back by its submitter");
        expect(sealer.failures().size() == (refused ? 0 : 1), "a seal failed without a word");
    }
}

void throw_in_the_pool() {
    for (int round = 0; round < 200; ++round) {
        std::thread::id caller = std::this_thread::get_id();
        std::atomic<int> inside{0};
        std::atomic<bool> thrown{false};
        bool caught = false;
        try {
            parallel(4, [&] {
                ++inside;
                // The caller stays until another has thrown: its own call ends well.
                while (std::this_thread::get_id() == caller && !thrown)
                    std::this_thread::yield();
                --inside;
                if (std::this_thread::get_id() == caller) return;
                thrown = true;
                throw std::runtime_error("no");
            });
        } catch (const std::runtime_error&) {
            caught = true;
        }
        expect(caught, "what a thread of the pool threw was lost");
        expect(inside == 0, "a thread of the pool is inside still");
    }
    std::atomic<int> calls{0};
    parallel(4, [&] { ++calls; });
    expect(calls >= 1, "the pool does no more work");
}

std::atomic<int> unsettled{0}; // copies that a stream was given since it was last waited for
std::atomic<bool> refusing{false};

Driver make_driver() {
    Driver driver{};
    driver.device_get = [](CuDevice*, int) { return 0; };
    driver.primary_retain = [](CuContext* out, CuDevice) { return *out = out, 0; };
    driver.context_get = [](CuContext* out) { return *out = out, 0; };
    driver.context_set = [](CuContext) { return 0; };
    driver.exchange_capture_mode = [](int*) { return 0; };
    driver.event_create = [](CuEvent*, unsigned) { return 0; };
    driver.event_record = [](CuEvent, CuStream) { return 0; };
    driver.event_synchronize = [](CuEvent) { return unsettled = 0; };
    driver.stream_create = [](CuStream*, unsigned) { return 0; };
    driver.stream_synchronize = [](CuStream) { return unsettled = 0; };
    driver.copy_to_host = [](void*, std::uint64_t source, std::size_t, CuStream) {
        ++unsettled;
        return refusing && source == 2 ? 1 : 0;
    };
    driver.error_name = driver.error_text = [](CuResult, const char** out) {
        return *out = "a text that is longer than what needs no memory", 0;
    };
    return driver;
}

void copy_without_memory() {
    std::shared_ptr<DeviceCopies> copies;
    expect(!DeviceCopies::make(0, 4096, copies), "no copies");
    auto copy = [&](std::uint64_t& ticket) { return copies->submit({{1, 2}, {1, 2}, {8, 8}, 0}, 0, ticket); };
    std::uint64_t good = 0, first = 0, last = 0;
    expect(!copy(good) && !copies->wait(good), "a copy that is refused");
    refusing = true;
    starved = "flashckpt-copy";
    expect(!copy(first), "a submission that is refused");
    expect(bool(copies->wait(first)), "a failed copy was reported as done");
    expect(unsettled == 0, "a copy that was reported as failed still runs");
    starved = nullptr;
    for (int count = 0; count < 1000; ++count)
        (void)copy(last);
    expect(bool(copies->wait(last)), "the last failed copy was reported as done");
    expect(bool(copies->wait(first)), "a failure was forgotten");
    refusing = false;
    expect(!copy(good) && !copies->wait(good), "copies are not made any more");
    // Not submitted without memory, since no thread would finish it.
    for (int count = 0; count < 12; ++count) {
        CopyJob job{{1, 2}, {1, 2}, {8, 8}, 0};
        std::uint64_t ticket = 0, before = copies->begin();
        left = count;
        try {
            (void)copies->submit(std::move(job), 0, ticket);
        } catch (const std::bad_alloc&) {
            expect(copies->begin() == before, "what was never submitted is waited for");
        }
        left = -1;
    }
    copies->close();
}

} // namespace

void* operator new(std::size_t num_bytes) {
    void* found = refuses() ? nullptr : std::malloc(num_bytes != 0 ? num_bytes : 1);
    if (found == nullptr) throw std::bad_alloc();
    return found;
}
void operator delete(void* memory) noexcept {
    std::free(memory);
}
void operator delete(void* memory, std::size_t) noexcept {
    std::free(memory);
}

const Driver* Driver::get(std::string&) {
    static const Driver driver = make_driver();
    return &driver;
}

Error Driver::failure(CuResult code, const std::string& what) const {
    const char* text = nullptr;
    error_text(code, &text);
    return {Kind::device, code, what + ": " + text, ""};
}

int main() {
    throw_in_the_pool();
    seal_without_memory();
    seal_here_without_memory();
    copy_without_memory();
}
