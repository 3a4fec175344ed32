#include "memory/pages.h"

#include "base/posix.h"
#include "sync/pool.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

namespace flashckpt {
namespace {

// While one is faulted in, a fork of this process has to wait: 12 ms for one of these, 120 for 32 MiB.
constexpr std::uint64_t kTurnBytes = 4 << 20;

void touch(std::uint64_t begin, std::uint64_t end, std::uint64_t page) {
    for (std::uint64_t at = begin; at < end; at += page) {
        // A write that changes nothing: another process's bytes stay as they are.
        auto* byte = reinterpret_cast<std::uint8_t*>(at);
        std::uint8_t seen = __atomic_load_n(byte, __ATOMIC_RELAXED);
        __atomic_compare_exchange_n(byte, &seen, seen, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    }
}

int fault_in(std::uint64_t begin, std::uint64_t end, std::uint64_t page) {
    for (;;) {
        if (::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_POPULATE_WRITE) == 0) return 0;
        if (errno == EINTR || errno == EAGAIN) continue;
        if (errno != EINVAL) return errno;
        touch(begin, end, page); // a kernel before 5.14
        return 0;
    }
}

bool gather(const Mapping& range) {
    // It says EAGAIN where a page is busy for a moment.
    for (int tries = 0; tries < 3; ++tries) {
        if (::madvise(range.data(), range.size(), MADV_COLLAPSE) == 0) return true;
        if (errno != EAGAIN && errno != EINTR) return false;
    }
    return false;
}

} // namespace

Error populate(std::uint64_t address, std::uint64_t num_bytes, int threads) {
    if (num_bytes == 0) return {};
    const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
    const std::uint64_t begin = address / page * page;
    const std::uint64_t end = round_up(address + num_bytes, page);
    std::atomic<std::uint64_t> next{begin};
    std::atomic<int> failed{0};
    parallel(threads, [&] {
        for (std::uint64_t at; failed.load() == 0 && (at = next.fetch_add(kTurnBytes)) < end;) {
            int code = fault_in(at, std::min(at + kTurnBytes, end), page);
            if (code != 0) failed.store(code);
        }
    });
    if (failed.load() == 0) return {};
    return os_error(failed.load(), "fault in " + std::to_string(num_bytes) + " bytes of memory");
}

Error take_huge_pages(int fd, std::uint64_t offset, std::uint64_t num_bytes, bool& taken) {
    taken = false;
    const std::uint64_t huge = huge_page();
    if (huge == 0) return {};
    const std::uint64_t begin = round_up(offset, huge);
    const std::uint64_t end = (offset + num_bytes) / huge * huge;
    taken = true;
    if (begin >= end) return {};
    // The kernel gathers pages into a huge one, whatever tmpfs was mounted with; where there is one page, the
    // others come as zeros, and nothing is copied.
    for (std::uint64_t at = begin; at < end; at += huge) {
        if (Error error = reserve(fd, at, kPage, "")) return error;
    }
    if (Error error = reserve(fd, end - kPage, kPage, "")) return error;
    Mapping range;
    taken = !Mapping::region(fd, begin, end - begin, range) && gather(range);
    return {};
}

} // namespace flashckpt
