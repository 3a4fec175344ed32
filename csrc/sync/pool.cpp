#include "sync/pool.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <mutex>
#include <new>
#include <pthread.h>
#include <thread>

namespace flashckpt {
namespace {

constexpr int kMostThreads = 64;

// One call of `parallel`, on its caller's stack. The caller returns only when `inside` is 0 and the queue has
// no invitation left.
struct Call {
    const std::function<void()>* work;
    int inside = 0;
    std::exception_ptr failure; // the first

    void fail(std::exception_ptr thrown) {
        if (!failure) failure = std::move(thrown);
    }
};

class Pool {
  public:
    void run(int threads, const std::function<void()>& work) {
        Call call{&work};
        invite(call, threads - 1);
        std::exception_ptr thrown = attempt(work);
        std::unique_lock lock(mutex_);
        call.fail(std::move(thrown));
        std::erase(invitations_, &call);
        left_.wait(lock, [&] { return call.inside == 0; });
        // Rethrow only now: other threads use this stack until here.
        if (call.failure) std::rethrow_exception(call.failure);
    }

  private:
    static std::exception_ptr attempt(const std::function<void()>& work) noexcept {
        try {
            work();
            return nullptr;
        } catch (...) {
            return std::current_exception();
        }
    }

    void invite(Call& call, int others) {
        std::lock_guard lock(mutex_);
        try {
            for (int i = 0; i < others; ++i)
                invitations_.push_back(&call);
        } catch (const std::bad_alloc&) {
            // With fewer threads or none, the caller does the work.
        }
        while (idle_ < static_cast<int>(invitations_.size()) && started_ < kMostThreads && start_thread()) {
        }
        invited_.notify_all();
    }

    bool start_thread() {
        SignalsBlocked blocked;
        try {
            std::thread([this] { serve(); }).detach();
        } catch (const std::exception&) {
            return false; // no thread can be started: the caller does the work
        }
        ++started_;
        ++idle_;
        return true;
    }

    [[noreturn]] void serve() {
        name_this_thread("flashckpt-work");
        std::unique_lock lock(mutex_);
        for (;;) {
            invited_.wait(lock, [&] { return !invitations_.empty(); });
            Call* call = invitations_.front();
            invitations_.pop_front();
            ++call->inside;
            --idle_;
            lock.unlock();
            std::exception_ptr thrown = attempt(*call->work);
            lock.lock();
            call->fail(std::move(thrown));
            ++idle_;
            --call->inside;
            left_.notify_all();
        }
    }

    std::mutex mutex_;
    std::condition_variable invited_;
    std::condition_variable left_;
    std::deque<Call*> invitations_;
    int idle_ = 0;
    int started_ = 0;
};

std::atomic<Pool*> current{nullptr};

// Never destroyed: its threads wait for work until the process ends. A forked child has none of the threads,
// and the lock may be held, so the child makes a new pool.
Pool& pool() {
    static std::once_flag once;
    std::call_once(once, [] { ::pthread_atfork(nullptr, nullptr, [] { current.store(nullptr); }); });
    Pool* found = current.load();
    if (found == nullptr) {
        auto* made = new Pool;
        if (current.compare_exchange_strong(found, made)) return *made;
        delete made;
    }
    return *found;
}

} // namespace

void parallel(int threads, const std::function<void()>& work) {
    threads = std::min(threads, kMostThreads);
    if (threads <= 1) return work();
    pool().run(threads, work);
}

void name_this_thread(const char* name) {
    char kept[16] = {};
    std::strncpy(kept, name, sizeof(kept) - 1);
    pthread_setname_np(pthread_self(), kept);
}

} // namespace flashckpt
