/* A file system that takes O_DIRECT at open and refuses each request made with it, as some do. It takes its time
 * to clear the flag: what other threads believe meanwhile is what is tested. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int refused(int file) {
    int flags = REAL(fcntl)(file, F_GETFL);
    if (flags < 0 || !(flags & O_DIRECT)) return 0;
    errno = EINVAL;
    return 1;
}

ssize_t pwrite(int file, const void* data, size_t count, off_t offset) {
    return refused(file) ? -1 : REAL(pwrite)(file, data, count, offset);
}
ssize_t pwrite64(int file, const void* data, size_t count, off_t offset) {
    return refused(file) ? -1 : REAL(pwrite)(file, data, count, offset);
}
ssize_t pread(int file, void* data, size_t count, off_t offset) {
    return refused(file) ? -1 : REAL(pread)(file, data, count, offset);
}
ssize_t pread64(int file, void* data, size_t count, off_t offset) {
    return refused(file) ? -1 : REAL(pread)(file, data, count, offset);
}

static int control(int file, int command, long argument) {
    if (command == F_SETFL && !(argument & O_DIRECT)) usleep(2000);
    return REAL(fcntl)(file, command, argument);
}
int fcntl(int file, int command, ...) {
    va_list arguments;
    va_start(arguments, command);
    long argument = va_arg(arguments, long);
    va_end(arguments);
    return control(file, command, argument);
}
int fcntl64(int file, int command, ...) {
    va_list arguments;
    va_start(arguments, command);
    long argument = va_arg(arguments, long);
    va_end(arguments);
    return control(file, command, argument);
}
