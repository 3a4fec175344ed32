#include "base/posix.h"

#include <algorithm>
#include <cerrno>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace flashckpt {

Fd::~Fd() {
    close();
}

int Fd::close() {
    if (fd_ < 0) return 0;
    int fd = std::exchange(fd_, -1);
    // Linux has closed the descriptor even when it says EINTR: a second close could hit another's file.
    if (::close(fd) == 0 || errno == EINTR) return 0;
    return errno;
}

Mapping::~Mapping() {
    if (data_ != nullptr) ::munmap(data_, size_);
}

Error Mapping::shared(int fd, std::uint64_t offset, std::size_t num_bytes, bool writable, Mapping& out) {
    int access = writable ? PROT_READ | PROT_WRITE : PROT_READ;
    void* data =
        ::mmap(nullptr, num_bytes, access, MAP_SHARED | MAP_POPULATE, fd, static_cast<off_t>(offset));
    if (data == MAP_FAILED) return os_error(errno, "map " + std::to_string(num_bytes) + " bytes of a region");
    Mapping made;
    made.data_ = data;
    made.size_ = num_bytes;
    out = std::move(made);
    return {};
}

Error Mapping::anonymous(std::size_t num_bytes, Mapping& out) {
    void* data = ::mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) return os_error(errno, "take " + std::to_string(num_bytes) + " bytes of memory");
    Mapping made;
    made.data_ = data;
    made.size_ = num_bytes;
    out = std::move(made);
    return {};
}

Error regular_size(int fd, const std::string& path, std::uint64_t& num_bytes) {
    struct stat status{};
    if (::fstat(fd, &status) != 0) return os_error(errno, "ask for the size", path);
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
    // In steps: a signal makes tmpfs give back all that one call has taken, so that one large call under a
    // timer's signals would never end.
    constexpr std::uint64_t step_bytes = 256ull << 20;
    std::uint64_t done = 0;
    while (done < num_bytes) {
        std::uint64_t step = std::min(step_bytes, num_bytes - done);
        if (::fallocate(fd, 0, static_cast<off_t>(offset + done), static_cast<off_t>(step)) == 0) {
            done += step;
        } else if (errno != EINTR) {
            return os_error(errno, "reserve " + std::to_string(num_bytes) + " bytes", path);
        }
    }
    return {};
}

} // namespace flashckpt
