#include "io/blocks.h"

#include <cerrno>
#include <fcntl.h>
#include <unistd.h>

namespace flashckpt {

void BlockFile::ask_direct(bool wanted) {
    // Use fcntl, since a refused open with O_CREAT | O_EXCL | O_DIRECT leaves a file behind.
    direct_.store(wanted && set_direct(fd_.get(), true));
}

// A device may have larger blocks than pages, and reports it only at a write. Clear O_DIRECT on the
// descriptor first and then the flag: threads that read the cleared flag make requests that must not fail for
// O_DIRECT.
void BlockFile::give_up_direct() {
    set_direct(fd_.get(), false);
    direct_.store(false);
}

Error BlockFile::write(const std::uint8_t* data, std::uint64_t num_bytes, std::uint64_t offset) {
    while (num_bytes > 0) {
        bool direct = direct_.load();
        ssize_t count = ::pwrite(fd_.get(), data, num_bytes, static_cast<off_t>(offset));
        if (count < 0) {
            const int code = errno;
            if (code == EINTR) continue;
            // `direct` as it was before the request: another thread may have given it up meanwhile.
            if (code == EINVAL && direct) {
                give_up_direct();
                continue;
            }
            return os_error(
                code, "write " + std::to_string(num_bytes) + " bytes at " + std::to_string(offset), path_);
        }
        if (count == 0) return os_error(EIO, "write: nothing was taken", path_);
        data += count;
        offset += static_cast<std::uint64_t>(count);
        num_bytes -= static_cast<std::uint64_t>(count);
        // The rest would not be aligned any more.
        if (num_bytes > 0 && static_cast<std::uint64_t>(count) % kPage != 0) give_up_direct();
    }
    return {};
}

Error BlockFile::read(std::uint8_t* data, std::uint64_t num_bytes, std::uint64_t room, std::uint64_t offset) {
    std::uint64_t done = 0;
    while (done < num_bytes) {
        bool direct = direct_.load();
        std::uint64_t asked = direct ? room - done : num_bytes - done;
        ssize_t count = ::pread(fd_.get(), data + done, asked, static_cast<off_t>(offset + done));
        if (count < 0) {
            const int code = errno;
            if (code == EINTR) continue;
            // `direct` as it was before the request: another thread may have given it up meanwhile.
            if (code == EINVAL && direct) {
                give_up_direct();
                continue;
            }
            return os_error(code, "read " + std::to_string(num_bytes) + " bytes at " + std::to_string(offset),
                            path_);
        }
        if (count == 0) return os_error(EIO, "read: the file became shorter meanwhile", path_);
        done += static_cast<std::uint64_t>(count);
        if (done < num_bytes && done % kPage != 0) give_up_direct();
    }
    return {};
}

Error BlockFile::close() {
    int code = fd_.close();
    return code == 0 ? Error{} : os_error(code, "close", path_);
}

Error open_to_read(const std::string& path, Fd& out) {
    // O_NONBLOCK: opening a named pipe in place of a file must not wait for a writer.
    int fd;
    do {
        fd = ::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
    } while (fd < 0 && errno == EINTR);
    if (fd < 0) return last_os_error("open to read", path);
    out = Fd(fd);
    return {};
}

} // namespace flashckpt
