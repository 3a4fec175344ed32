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
    // Leaves it to whoever has it: for a forked child that was not given it.
    void forget();
    // Gives the pages of anonymous memory back: they are zeros from here on.
    void empty();
    // What of anonymous memory is not there yet comes in small pages.
    void prefer_small_pages();

    // Mappings of files lie in the huge pages of the address space as their bytes do in those of the file:
    // where the file is held in huge pages, they are mapped as such.
    // `offset` must be a multiple of the machine's page; pages are faulted in at once.
    static Error shared(int fd, std::uint64_t offset, std::size_t num_bytes, bool writable, Mapping& out);
    // The same to be written, and nothing faulted in. Loader workers are forked later and must not copy its
    // page tables; a core dump must not hold a model.
    static Error region(int fd, std::uint64_t offset, std::size_t num_bytes, Mapping& out);
    static Error anonymous(std::size_t num_bytes, Mapping& out);
    // The same for what is large and not to be found in a forked child or in a core dump; in huge pages where
    // the kernel gives them.
    static Error large(std::size_t num_bytes, Mapping& out);

  private:
    static Error take(void* data, std::size_t num_bytes, const char* what, Mapping& out);

    void* data_ = nullptr;
    std::size_t size_ = 0;
};

// Bytes of the machine's huge page; 0 where it has none, or none that is small beside a region.
std::uint64_t huge_page();
// Size of the regular file behind `fd`; an error for anything that is no regular file.
Error regular_size(int fd, const std::string& path, std::uint64_t& num_bytes);
// Sets or clears O_DIRECT on an open descriptor; false where the file system refuses it.
bool set_direct(int fd, bool on);
// fallocate; an error also where the file system has no such call. What was taken before an error stays.
Error reserve(int fd, std::uint64_t offset, std::uint64_t num_bytes, const std::string& path);

} // namespace flashckpt
