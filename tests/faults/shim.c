/* Faults of storage, preloaded into a process: what is done to files below a folder fails, is cut short, is
 * slow or hangs, as a page that the test maps as well says, from one call to the next. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum call { WRITE = 1, SYNC = 2, LINK = 4, READ = 8 };
enum mode { WELL = 0, FAIL = 1, SHORT = 2, SLOW = 3, HANG = 4, REFUSE = 5 };

struct control {
    _Atomic unsigned mode, calls, micros, hits;
};

static struct control* control(void) {
    static struct control* page;
    if (page == NULL) {
        int file = open(getenv("FAULT_CONTROL"), O_RDWR | O_CLOEXEC);
        if (file < 0) abort();
        page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        close(file);
        if (page == MAP_FAILED) abort();
    }
    return page;
}

static int concerns(int file) {
    char link[64], path[4096];
    const char* folder = getenv("FAULT_FOLDER");
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0 || folder == NULL) return 0;
    path[length] = 0;
    return strncmp(path, folder, strlen(folder)) == 0;
}

static int is_folder(int file) {
    struct stat status;
    return fstat(file, &status) == 0 && S_ISDIR(status.st_mode);
}

/* What is to happen to this call. Does the waiting itself. */
static unsigned struck(enum call call, int file) {
    struct control* page = control();
    unsigned mode = page->mode;
    if (mode == WELL || !(page->calls & call) || !concerns(file)) return WELL;
    if (mode == REFUSE && !is_folder(file)) return WELL;
    page->hits++;
    if (mode == SLOW) usleep(page->micros);
    while (mode == HANG && page->mode == HANG) usleep(1000);
    return mode;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static ssize_t write_at(int file, const void* data, size_t count, off_t offset, int is_at) {
    unsigned mode = struck(WRITE, file);
    if (mode == FAIL) {
        errno = EIO;
        return -1;
    }
    /* Direct writes must stay whole blocks. */
    if (mode == SHORT && count > 1) count = is_at && count > 4096 ? count / 2 / 4096 * 4096 : (is_at ? count : count / 2);
    return is_at ? REAL(pwrite)(file, data, count, offset) : REAL(write)(file, data, count);
}

ssize_t write(int file, const void* data, size_t count) { return write_at(file, data, count, 0, 0); }
ssize_t pwrite(int file, const void* data, size_t count, off_t offset) {
    return write_at(file, data, count, offset, 1);
}
ssize_t pwrite64(int file, const void* data, size_t count, off_t offset) {
    return write_at(file, data, count, offset, 1);
}

static ssize_t read_at(int file, void* data, size_t count, off_t offset) {
    if (struck(READ, file) == FAIL) {
        errno = EIO;
        return -1;
    }
    return REAL(pread)(file, data, count, offset);
}

ssize_t pread(int file, void* data, size_t count, off_t offset) { return read_at(file, data, count, offset); }
ssize_t pread64(int file, void* data, size_t count, off_t offset) { return read_at(file, data, count, offset); }

static int failed(enum call call, int file) {
    unsigned mode = struck(call, file);
    errno = mode == REFUSE ? (int)control()->micros : EIO;
    return mode == FAIL || mode == REFUSE;
}

int fsync(int file) { return failed(SYNC, file) ? -1 : REAL(fsync)(file); }
int fdatasync(int file) { return failed(SYNC, file) ? -1 : REAL(fdatasync)(file); }
int linkat(int from, const char* source, int to, const char* target, int flags) {
    return failed(LINK, to) ? -1 : REAL(linkat)(from, source, to, target, flags);
}
