// Owners of descriptors and mappings, and system calls that continue after EINTR.
#pragma once

#include "base/error.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

namespace flashckpt {

constexpr std::uint64_t kPage = 4096; // the unit of images and of O_DIRECT, on machines of any page size

constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t unit) {
    return (value + unit - 1) / unit * unit;
}

// Owns one open descriptor.
class Fd {
  public:
    Fd() = default;
    explicit Fd(int fd) : fd_(fd) {}
    Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    Fd& operator=(Fd&& other) noexcept {
        std::swap(fd_, other.fd_);
        return *this;
    }
    Fd(const Fd&) = delete;
    Fd& operator=(const Fd&) = delete;
    ~Fd();

    int get() const { return fd_; }
    explicit operator bool() const { return fd_ >= 0; }
    // Closes the descriptor and returns errno or 0: a file system may report a lost write only here.
    int close();

  private:
    int fd_ = -1;
};

// Owns one mapping; the destructor unmaps it.
class Mapping {
  public:
    Mapping() = default;
    Mapping(Mapping&& other) noexcept
        : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
    Mapping& operator=(Mapping&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
        return *this;
    }
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;
    ~Mapping();

    std::uint8_t* data() const { return static_cast<std::uint8_t*>(data_); }
    std::size_t size() const { return size_; }
    // Gives up ownership without unmapping, for a forked child, which does not have the mapping.
    void forget();

    // Aligns a file's mapping to huge pages like the file's own offsets, so that huge pages of the file are
    // mapped as huge pages. `offset` must be a multiple of the machine's page. Faults in all pages.
    static Error shared(int fd, std::uint64_t offset, std::size_t num_bytes, bool writable, Mapping& out);
    // Like `map_region`, writable and without faulting in. Loader workers forked later must not copy its page
    // tables, and a core dump must not contain a model.
    static Error region(int fd, std::uint64_t offset, std::size_t num_bytes, Mapping& out);
    // Private zeros, which forked children and core dumps do not have. A direct read into memory that a fork
    // copies may land in the child.
    static Error anonymous(std::size_t num_bytes, Mapping& out);

  private:
    static Error take(void* data, std::size_t num_bytes, const char* what, Mapping& out);

    void* data_ = nullptr;
    std::size_t size_ = 0;
};

// Bytes of the machine's huge page; 0 if it has none or if it is large compared with a region.
std::uint64_t huge_page();
// Size of the regular file behind `fd`; an error for other kinds of files.
Error regular_size(int fd, const std::string& path, std::uint64_t& num_bytes);
// Sets or clears O_DIRECT on an open descriptor; false if the file system refuses it.
bool set_direct(int fd, bool on);
// fallocate; also an error if the file system does not support it. Space taken before an error stays.
Error reserve(int fd, std::uint64_t offset, std::uint64_t num_bytes, const std::string& path);

} // namespace flashckpt
