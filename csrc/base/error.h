// Errors as values. Carries a failure from its origin to the bindings, which turn it into an exception.
// Throws nothing itself.
#pragma once

#include <cstdint>
#include <string>

namespace flashckpt {

enum class Kind : std::uint8_t {
    none,   // no error
    os,     // a system call failed: `code` is errno
    value,  // an argument or the length of a file is wrong
    device, // an accelerator's driver failed: `code` is the driver's
};

struct Error {
    Kind kind = Kind::none;
    int code = 0;
    std::string message;
    std::string path;

    explicit operator bool() const { return kind != Kind::none; }
};

// `what` names the operation ("write", "reserve 4096 bytes"); the message also has the text of errno.
Error os_error(int code, const std::string& what, const std::string& path = "");
// Like `os_error` with the current errno. Reads errno before it calls anything or makes a string.
Error last_os_error(const char* what, const std::string& path);
Error last_os_error(const char* what);
Error value_error(const std::string& message);

} // namespace flashckpt
