// Complete reads and writes on one open file, past the page cache if the file system allows it.
#pragma once

#include "base/error.h"
#include "base/posix.h"

#include <atomic>
#include <cstdint>
#include <string>

namespace flashckpt {

// One open file, used by several threads. Direct requests need memory, offset and size in whole pages.
class BlockFile {
  public:
    BlockFile(Fd fd, std::string path) : fd_(std::move(fd)), path_(std::move(path)) {}

    int fd() const { return fd_.get(); }
    const std::string& path() const { return path_; }
    // Requests O_DIRECT. If it is refused now or later, requests go through the cache.
    void ask_direct(bool wanted);
    // Whether every request so far bypassed the cache.
    bool direct() const { return direct_.load(); }

    // Writes all bytes or returns an error.
    Error write(const std::uint8_t* data, std::uint64_t num_bytes, std::uint64_t offset);
    // Reads at least `num_bytes` and at most `room` bytes (whole pages): a read of the last block of a file
    // requests a whole page and returns less.
    Error read(std::uint8_t* data, std::uint64_t num_bytes, std::uint64_t room, std::uint64_t offset);
    Error close();

  private:
    void give_up_direct();

    Fd fd_;
    std::string path_;
    std::atomic<bool> direct_{false};
};

// Opens a regular file for reading. Follows no link, never blocks, and sets O_CLOEXEC.
Error open_to_read(const std::string& path, Fd& out);

} // namespace flashckpt
