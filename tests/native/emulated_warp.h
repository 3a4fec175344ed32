// CUDA's words for a kernel that is compiled for the host: each thread of a warp is a context of its own, and
// all of a warp meet at every shuffle, as they do on a device. A kernel whose threads part ways before a
// shuffle, or that loads or stores a byte outside of what was allowed, ends the process and says so.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <random>
#include <ucontext.h>
#include <utility>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

#define __global__
#define __device__
#define __launch_bounds__(...)

struct EmulatedIndex {
    unsigned x = 0;
};
inline EmulatedIndex blockIdx, threadIdx, gridDim;

namespace emulated {

[[noreturn]] inline void fail(const char* what) {
    std::fprintf(stderr, "emulated kernel: %s\n", what);
    std::abort();
}

// What the kernel did, and where it may.
struct Memory {
    using Ranges = std::vector<std::pair<std::uintptr_t, std::uintptr_t>>;
    Ranges readable, writable;
    std::uint64_t loaded_bytes = 0, stored_bytes = 0, atomic_adds = 0;

    static void touch(const Ranges& ranges, std::uintptr_t address, std::size_t size, const char* what) {
        if (address % size != 0) fail(what);
        static std::size_t last = 0; // neighbours are asked one after the other
        for (std::size_t i = 0; i < ranges.size(); ++i) {
            const auto& [begin, end] = ranges[(last + i) % ranges.size()];
            if (address < begin || address + size > end) continue;
            last = (last + i) % ranges.size();
            return;
        }
        fail(what);
    }
};
inline Memory memory;

constexpr int kThreads = 32;

class Warp;

struct Thread {
    static constexpr std::size_t kStackBytes = 256 << 10;
    ucontext_t context{};
    std::unique_ptr<char[]> stack{new char[kStackBytes]};
    Warp* warp = nullptr;
    unsigned number = 0; // within the block
    bool ended = false;
    std::uint64_t shuffles = 0, value = 0;
    int mask = 0;
    void* fake_stack = nullptr;
};
inline Thread* running = nullptr;

class Warp {
  public:
    Warp(unsigned block, unsigned first_thread, std::function<void()> kernel)
        : block_(block), kernel_(std::move(kernel)), threads_(kThreads) {
        for (int i = 0; i < kThreads; ++i) {
            Thread& thread = threads_[i];
            thread.warp = this;
            thread.number = first_thread + i;
            getcontext(&thread.context);
            thread.context.uc_stack.ss_sp = thread.stack.get();
            thread.context.uc_stack.ss_size = Thread::kStackBytes;
            makecontext(&thread.context, enter, 0);
        }
    }

    // Until the next shuffle of all its threads; false when the kernel has ended in all of them.
    bool step() {
        int ended = 0;
        for (Thread& thread : threads_) {
            resume(thread);
            ended += thread.ended;
        }
        if (ended == kThreads) return false;
        if (ended != 0) fail("threads ended before a shuffle of the others");
        std::vector<std::uint64_t> values;
        for (const Thread& thread : threads_) {
            if (thread.shuffles != threads_[0].shuffles || thread.mask != threads_[0].mask)
                fail("threads met at different shuffles");
            values.push_back(thread.value);
        }
        for (int i = 0; i < kThreads; ++i)
            threads_[i].value = values[i ^ threads_[i].mask];
        return true;
    }

    std::uint64_t shuffle(std::uint64_t value, int mask) {
        Thread& thread = *running;
        thread.value = value;
        thread.mask = mask;
        ++thread.shuffles;
        leave(thread, false);
        return thread.value;
    }

  private:
    void resume(Thread& thread) {
        blockIdx.x = block_;
        threadIdx.x = thread.number;
        running = &thread;
#if defined(__SANITIZE_ADDRESS__)
        void* mine = nullptr;
        __sanitizer_start_switch_fiber(&mine, thread.stack.get(), Thread::kStackBytes);
#endif
        swapcontext(&scheduler_, &thread.context);
#if defined(__SANITIZE_ADDRESS__)
        __sanitizer_finish_switch_fiber(mine, nullptr, nullptr);
#endif
    }

    void leave(Thread& thread, bool for_good) {
#if defined(__SANITIZE_ADDRESS__)
        __sanitizer_start_switch_fiber(for_good ? nullptr : &thread.fake_stack, scheduler_stack_,
                                       scheduler_stack_bytes_);
#endif
        thread.ended = for_good;
        swapcontext(&thread.context, &scheduler_);
#if defined(__SANITIZE_ADDRESS__)
        __sanitizer_finish_switch_fiber(thread.fake_stack, &scheduler_stack_, &scheduler_stack_bytes_);
#endif
    }

    static void enter() {
        Thread& thread = *running;
#if defined(__SANITIZE_ADDRESS__)
        __sanitizer_finish_switch_fiber(nullptr, &thread.warp->scheduler_stack_,
                                        &thread.warp->scheduler_stack_bytes_);
#endif
        thread.warp->kernel_();
        thread.warp->leave(thread, true);
        fail("a thread continued after its end");
    }

    unsigned block_;
    std::function<void()> kernel_;
    std::vector<Thread> threads_;
    ucontext_t scheduler_{};
    const void* scheduler_stack_ = nullptr;
    std::size_t scheduler_stack_bytes_ = 0;
};

// All warps of a launch, a few at a time and in an order that `seed` decides, each for a step.
inline void launch(unsigned num_blocks, unsigned block_threads, std::uint64_t seed,
                   const std::function<void()>& kernel) {
    gridDim.x = num_blocks;
    std::mt19937_64 random(seed);
    std::vector<std::pair<unsigned, unsigned>> waiting;
    for (unsigned block = 0; block < num_blocks; ++block) {
        for (unsigned first = 0; first < block_threads; first += kThreads)
            waiting.emplace_back(block, first);
    }
    std::shuffle(waiting.begin(), waiting.end(), random);
    std::vector<std::unique_ptr<Warp>> live;
    while (!waiting.empty() || !live.empty()) {
        while (!waiting.empty() && live.size() < 4) {
            live.push_back(std::make_unique<Warp>(waiting.back().first, waiting.back().second, kernel));
            waiting.pop_back();
        }
        std::size_t chosen = random() % live.size();
        if (!live[chosen]->step()) live.erase(live.begin() + static_cast<std::ptrdiff_t>(chosen));
    }
}

} // namespace emulated

template <class Value> Value __shfl_xor_sync(unsigned mask, Value value, int thread_mask) {
    if (mask != 0xFFFFFFFFu) emulated::fail("a shuffle of less than a warp");
    return static_cast<Value>(emulated::running->warp->shuffle(value, thread_mask));
}
template <class Value> Value atomicAdd(Value* at, Value value) {
    ++emulated::memory.atomic_adds;
    return std::exchange(*at, *at + value);
}
inline void __threadfence() {}

template <class Unit> std::uint64_t load_unit(const Unit* at) {
    emulated::Memory::touch(emulated::memory.readable, reinterpret_cast<std::uintptr_t>(at), sizeof(Unit),
                            "a load outside of a leaf, or not aligned");
    emulated::memory.loaded_bytes += sizeof(Unit);
    return *const_cast<const volatile Unit*>(at);
}
template <class Unit> void store_unit(Unit* at, std::uint64_t unit) {
    emulated::Memory::touch(emulated::memory.writable, reinterpret_cast<std::uintptr_t>(at), sizeof(Unit),
                            "a store outside of a clone, or not aligned");
    emulated::memory.stored_bytes += sizeof(Unit);
    *const_cast<volatile Unit*>(at) = static_cast<Unit>(unit);
}
