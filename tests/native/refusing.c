/* A file system that takes O_DIRECT at open and refuses each request made with it, as some do, or each beyond
 * the offset REFUSED_FROM: one before it ends there. It takes its time to clear the flag: what other threads
 * believe meanwhile is what is tested. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

/* Direct requests that were refused, and that were taken. */
_Atomic int refusals, taken;

static int refused(int file, off_t offset, size_t* count) {
    int flags = REAL(fcntl)(file, F_GETFL);
    if (flags < 0 || !(flags & O_DIRECT)) return 0;
    off_t from = atoll(getenv("REFUSED_FROM"));
    if (offset >= from) {
        refusals++;
        errno = EINVAL;
        return 1;
    }
    taken++;
    if (offset + (off_t)*count > from) *count = (size_t)(from - offset);
    return 0;
}

ssize_t pwrite(int file, const void* data, size_t count, off_t offset) {
    return refused(file, offset, &count) ? -1 : REAL(pwrite)(file, data, count, offset);
}
ssize_t pwrite64(int file, const void* data, size_t count, off_t offset) {
    return pwrite(file, data, count, offset);
}
ssize_t pread(int file, void* data, size_t count, off_t offset) {
    return refused(file, offset, &count) ? -1 : REAL(pread)(file, data, count, offset);
}
ssize_t pread64(int file, void* data, size_t count, off_t offset) {
    return pread(file, data, count, offset);
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
