// Descriptors and mappings with an owner, and system calls that go on after EINTR.
#pragma once

#include "base/error.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

namespace flashckpt {

constexpr std::uint64_t kPage = 4096; // the unit of images and of O_DIRECT, whatever the machine's page is

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
    // Closes now and returns errno or 0: a file system may report a lost write only here.
    int close();

  private:
    int fd_ = -1;
};

// Owns one mapping; unmaps it when it goes.
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

    // `offset` must be a multiple of the machine's page; pages are faulted in at once.
    static Error shared(int fd, std::uint64_t offset, std::size_t num_bytes, bool writable, Mapping& out);
    static Error anonymous(std::size_t num_bytes, Mapping& out);

  private:
    void* data_ = nullptr;
    std::size_t size_ = 0;
};

// Size of the regular file behind `fd`; an error for anything that is no regular file.
Error regular_size(int fd, const std::string& path, std::uint64_t& num_bytes);
// Sets or clears O_DIRECT on an open descriptor; false where the file system refuses it.
bool set_direct(int fd, bool on);
// fallocate; an error also where the file system has no such call. What was taken before an error stays.
Error reserve(int fd, std::uint64_t offset, std::uint64_t num_bytes, const std::string& path);

} // namespace flashckpt
