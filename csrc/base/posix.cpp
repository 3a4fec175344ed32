#include "base/posix.h"

#include "base/signals.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace flashckpt {
namespace {

// Larger huge pages (512 MiB, with pages of 64 KiB) would make a region mostly padding.
constexpr std::uint64_t kLargestHugePage = 32ull << 20;
constexpr int kNothing = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

std::uint64_t read_huge_page() {
    Fd fd(::open("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size", O_RDONLY | O_CLOEXEC));
    char text[32] = {};
    if (!fd || ::read(fd.get(), text, sizeof(text) - 1) <= 0) return 0;
    std::uint64_t num_bytes = std::strtoull(text, nullptr, 10);
    bool is_power = num_bytes != 0 && (num_bytes & (num_bytes - 1)) == 0;
    return is_power && num_bytes > kPage && num_bytes <= kLargestHugePage ? num_bytes : 0;
}

// Returns a free address that is `offset` modulo `huge`, with room for `num_bytes`, or null.
void* aligned_place(std::uint64_t offset, std::size_t num_bytes, std::uint64_t huge) {
    void* room = ::mmap(nullptr, num_bytes + huge, PROT_NONE, kNothing, -1, 0);
    if (room == MAP_FAILED) return nullptr;
    ::munmap(room, num_bytes + huge);
    const auto begin = reinterpret_cast<std::uint64_t>(room);
    return reinterpret_cast<void*>(begin + ((offset - begin) & (huge - 1)));
}

void* map_aligned(int fd, std::uint64_t offset, std::size_t num_bytes, int access, int flags) {
    const std::uint64_t huge = huge_page();
    void* place = nullptr;
    if (huge != 0 && num_bytes >= huge) place = aligned_place(offset, num_bytes, huge);
    // A hint, not MAP_FIXED: a failed MAP_FIXED leaves a hole (Linux before 6.12), which another thread may
    // map before it is restored. If another thread takes the address first, the mapping gets another address
    // and small pages.
    return ::mmap(place, num_bytes, access, flags, fd, static_cast<off_t>(offset));
}

// Excludes a mapping from forked children and from core dumps.
Error keep_private(void* data, std::size_t num_bytes) {
    if (::madvise(data, num_bytes, MADV_DONTFORK) == 0 && ::madvise(data, num_bytes, MADV_DONTDUMP) == 0)
        return {};
    return last_os_error("keep a mapping from forks and core dumps");
}

// No fork may happen between the call that maps a region and the call that excludes it from forks: the child
// would hold the region's memory until it ends. Mapping threads exclude a fork, but not each other.
class ForkGuard {
  public:
    ForkGuard() { ::pthread_rwlock_rdlock(lock()); }
    ~ForkGuard() { ::pthread_rwlock_unlock(lock()); }
    ForkGuard(const ForkGuard&) = delete;
    ForkGuard& operator=(const ForkGuard&) = delete;

  private:
    static pthread_rwlock_t* make() {
        static pthread_rwlock_t made;
        pthread_rwlockattr_t kind;
        ::pthread_rwlockattr_init(&kind);
        // Without a preference for writers, a fork could wait forever while threads map.
        ::pthread_rwlockattr_setkind_np(&kind, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP);
        ::pthread_rwlock_init(&made, &kind);
        ::pthread_atfork([] { ::pthread_rwlock_wrlock(lock()); }, [] { ::pthread_rwlock_unlock(lock()); },
                         // Initialised anew, not unlocked: no thread of the child holds it.
                         [] { ::pthread_rwlock_init(lock(), nullptr); });
        return &made;
    }
    static pthread_rwlock_t* lock() {
        static pthread_rwlock_t* const made = make();
        return made;
    }
};

} // namespace

Fd::~Fd() {
    close();
}

int Fd::close() {
    if (fd_ < 0) return 0;
    int fd = std::exchange(fd_, -1);
    // Linux closes the descriptor even on EINTR: a second close could hit another thread's file.
    if (::close(fd) == 0 || errno == EINTR) return 0;
    return errno;
}

Mapping::~Mapping() {
    if (data_ != nullptr) ::munmap(data_, size_);
}

void Mapping::forget() {
    data_ = nullptr;
    size_ = 0;
}

Error Mapping::take(void* data, std::size_t num_bytes, const char* what, Mapping& out) {
    const int code = errno;
    if (data == MAP_FAILED) return os_error(code, "map " + std::to_string(num_bytes) + " bytes of " + what);
    Mapping made;
    made.data_ = data;
    made.size_ = num_bytes;
    out = std::move(made);
    return {};
}

Error Mapping::shared(int fd, std::uint64_t offset, std::size_t num_bytes, bool writable, Mapping& out) {
    int access = writable ? PROT_READ | PROT_WRITE : PROT_READ;
    ForkGuard guard;
    void* data = map_aligned(fd, offset, num_bytes, access, MAP_SHARED | MAP_POPULATE);
    if (Error error = take(data, num_bytes, "a region", out)) return error;
    if (::madvise(data, num_bytes, MADV_DONTFORK) == 0) return {};
    return last_os_error("keep a region from forks");
}

Error Mapping::region(int fd, std::uint64_t offset, std::size_t num_bytes, Mapping& out) {
    ForkGuard guard;
    void* data = map_aligned(fd, offset, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED);
    if (Error error = take(data, num_bytes, "a region", out)) return error;
    return keep_private(data, num_bytes);
}

Error Mapping::anonymous(std::size_t num_bytes, Mapping& out) {
    ForkGuard guard;
    void* data = ::mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (Error error = take(data, num_bytes, "memory", out)) return error;
    return keep_private(data, num_bytes);
}

std::uint64_t huge_page() {
    static const std::uint64_t num_bytes = read_huge_page();
    return num_bytes;
}

Error regular_size(int fd, const std::string& path, std::uint64_t& num_bytes) {
    struct stat status{};
    if (::fstat(fd, &status) != 0) return last_os_error("ask for the size", path);
    if (!S_ISREG(status.st_mode)) return os_error(EINVAL, "not a regular file", path);
    num_bytes = static_cast<std::uint64_t>(status.st_size);
    return {};
}

bool set_direct(int fd, bool on) {
    int flags = ::fcntl(fd, F_GETFL);
    if (flags < 0) return false;
    int wanted = on ? flags | O_DIRECT : flags & ~O_DIRECT;
    return ::fcntl(fd, F_SETFL, wanted) == 0;
}

Error reserve(int fd, std::uint64_t offset, std::uint64_t num_bytes, const std::string& path) {
    // A signal makes tmpfs return all memory of the call, so under a timer's signals a call would never end.
    // So signals are blocked, and a call reserves one step.
    constexpr std::uint64_t step_bytes = 256ull << 20;
    SignalsBlocked blocked;
    std::uint64_t done = 0;
    while (done < num_bytes) {
        std::uint64_t step = std::min(step_bytes, num_bytes - done);
        if (::fallocate(fd, 0, static_cast<off_t>(offset + done), static_cast<off_t>(step)) == 0) {
            done += step;
        } else if (const int code = errno; code != EINTR) {
            return os_error(code, "reserve " + std::to_string(num_bytes) + " bytes", path);
        }
    }
    return {};
}

} // namespace flashckpt
