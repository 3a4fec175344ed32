#include "memory/pages.h"

#include "base/posix.h"
#include "sync/pool.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

namespace flashckpt {
namespace {

// A fork waits while a piece is faulted in: 12 ms for this size, 120 ms for 32 MiB.
constexpr std::uint64_t kTurnBytes = 4 << 20;
// The most nodes that a kernel can have (CONFIG_NODES_SHIFT is at most 10).
constexpr int kMostNodes = 1024;
constexpr int kWordBits = 8 * sizeof(unsigned long);

void touch(std::uint64_t begin, std::uint64_t end, std::uint64_t page) {
    for (std::uint64_t at = begin; at < end; at += page) {
        // A write that changes nothing, so another process's bytes are not affected.
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
    // EAGAIN: a page is busy for a moment.
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

Error prefer_node(int fd, std::uint64_t num_bytes, int node) {
    if (node < 0 || node >= kMostNodes) return value_error("a NUMA node is a number from 0 to 1023");
    Mapping range;
    if (Error error = Mapping::region(fd, 0, num_bytes, range)) return error;
    unsigned long nodes[kMostNodes / kWordBits] = {};
    nodes[node / kWordBits] = 1ul << (node % kWordBits);
    // MPOL_PREFERRED, not MPOL_BIND: a node without free memory must not cause an out-of-memory kill. The
    // kernel expects the number of bits plus one.
    long done = ::syscall(SYS_mbind, range.data(), range.size(), MPOL_PREFERRED, nodes, kMostNodes + 1ul, 0u);
    return done == 0 ? Error{} : last_os_error("prefer a NUMA node");
}

Error take_huge_pages(int fd, std::uint64_t offset, std::uint64_t num_bytes, bool& taken) {
    taken = false;
    const std::uint64_t huge = huge_page();
    if (huge == 0) return {};
    const std::uint64_t begin = round_up(offset, huge);
    const std::uint64_t end = (offset + num_bytes) / huge * huge;
    taken = true;
    if (begin >= end) return {};
    // The kernel collapses pages into a huge page, whatever tmpfs was mounted with. If one page exists, the
    // kernel fills the others with zeros and copies nothing.
    for (std::uint64_t at = begin; at < end; at += huge) {
        if (Error error = reserve(fd, at, kPage, "")) return error;
    }
    if (Error error = reserve(fd, end - kPage, kPage, "")) return error;
    Mapping range;
    taken = !Mapping::region(fd, begin, end - begin, range) && gather(range);
    return {};
}

} // namespace flashckpt
