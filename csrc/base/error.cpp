#include "base/error.h"

#include <cerrno>
#include <system_error>

namespace flashckpt {

Error os_error(int code, const std::string& what, const std::string& path) {
    return {Kind::os, code, std::generic_category().message(code) + " (" + what + ")", path};
}

Error last_os_error(const char* what, const std::string& path) {
    const int code = errno;
    return os_error(code, what, path);
}

Error last_os_error(const char* what) {
    const int code = errno;
    return os_error(code, what);
}

Error value_error(const std::string& message) {
    return {Kind::value, 0, message, ""};
}

} // namespace flashckpt
