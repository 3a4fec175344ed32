// Errors as values. Owns how a failure is carried from the place it happened to the binding's edge, where
// it becomes an exception; throws nothing itself.
#pragma once

#include <cstdint>
#include <string>

namespace flashckpt {

enum class Kind : std::uint8_t {
    none,   // no error
    os,     // a system call failed: `code` is errno
    value,  // an argument, or the length of a file, is not what it has to be
    device, // an accelerator's driver refused: `code` is the driver's
};

struct Error {
    Kind kind = Kind::none;
    int code = 0;
    std::string message;
    std::string path;

    explicit operator bool() const { return kind != Kind::none; }
};

// `what` says what was being done ("write", "reserve 4096 bytes"); the text of errno is added to it.
Error os_error(int code, const std::string& what, const std::string& path = "");
// The same of errno as it is: nothing is called, and no string made, before it is read.
Error last_os_error(const char* what, const std::string& path);
Error last_os_error(const char* what);
Error value_error(const std::string& message);

} // namespace flashckpt
