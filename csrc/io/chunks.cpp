#include "io/chunks.h"

#include "sync/pool.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <mutex>
#include <new>

namespace flashckpt {

Error each_chunk(std::uint64_t num_chunks, int threads, const std::function<ChunkWork()>& make) {
    std::atomic<std::uint64_t> next{0};
    std::atomic<bool> failed{false};
    std::mutex mutex;
    Error first;
    int useful = static_cast<int>(std::min<std::uint64_t>(num_chunks, static_cast<std::uint64_t>(threads)));
    auto fail = [&](Error error) {
        std::lock_guard lock(mutex);
        if (!failed.exchange(true)) first = std::move(error);
    };
    parallel(useful, [&] {
        try {
            ChunkWork work = make();
            for (std::uint64_t chunk; !failed.load() && (chunk = next.fetch_add(1)) < num_chunks;) {
                if (Error error = work(chunk)) fail(std::move(error));
            }
        } catch (const std::bad_alloc&) {
            fail({Kind::os, ENOMEM, "no memory", ""});
        }
    });
    return first;
}

void report_progress(std::uint64_t address, std::uint64_t num_bytes) {
    if (address == 0) return;
    __atomic_fetch_add(reinterpret_cast<std::uint64_t*>(address), num_bytes, __ATOMIC_RELEASE);
}

int requests_in_flight(int threads) {
    return std::clamp(threads, 1, 16) * 3;
}

} // namespace flashckpt
