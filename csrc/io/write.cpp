#include "io/write.h"

#include "base/posix.h"
#include "io/blocks.h"
#include "io/chunks.h"

#include <cerrno>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

namespace flashckpt {
namespace {

Error create(const std::string& path, Fd& out) {
    int fd;
    do {
        fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644);
    } while (fd < 0 && errno == EINTR);
    if (fd < 0) return last_os_error("create", path);
    out = Fd(fd);
    return {};
}

// Removes the unfinished file, unless its name now belongs to another file.
void remove_begun(int fd, const std::string& path) {
    struct stat ours{};
    struct stat named{};
    if (::fstat(fd, &ours) != 0 || ::lstat(path.c_str(), &named) != 0) return;
    if (ours.st_dev == named.st_dev && ours.st_ino == named.st_ino) ::unlink(path.c_str());
}

// Touching a mapped page past the end of its file raises SIGBUS, so the size is checked before each chunk.
Error check_source(const WriteRequest& request) {
    std::uint64_t size = 0;
    if (Error error = regular_size(request.source_fd, "", size)) return error;
    if (request.source_offset > size || request.geometry.num_bytes > size - request.source_offset) {
        return os_error(EIO, "the source region ends before the bytes that are to be written", request.path);
    }
    return {};
}

Error check_request(const WriteRequest& request) {
    if (Error error = request.geometry.check()) return error;
    auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
    if (request.source_offset % page != 0) return value_error("source_offset must be a multiple of the page");
    if (request.geometry.chunk_bytes % page != 0)
        return value_error("chunk_bytes must be a multiple of the page");
    return check_source(request);
}

Error prepare(const BlockFile& file, std::uint64_t num_bytes) {
    std::uint64_t rounded = round_up(num_bytes, kPage);
    Error error = reserve(file.fd(), 0, rounded, file.path());
    // Reserving only avoids fragments and a late ENOSPC, so ignore file systems without it (NFS before 4.2).
    if (error && error.code != EOPNOTSUPP && error.code != ENOSYS) return error;
    // Requests that extend a file are serialized, so set its length before the first.
    if (::ftruncate(file.fd(), static_cast<off_t>(rounded)) != 0)
        return last_os_error("set the length", file.path());
    return {};
}

Error write_chunks(const WriteRequest& request, BlockFile& file, Audit& audit, WriteResult& result) {
    const Geometry& geometry = request.geometry;
    auto one = [&](std::uint64_t chunk) -> Error {
        if (Error error = check_source(request)) return error;
        std::uint64_t start = chunk * geometry.chunk_bytes;
        std::uint64_t count = geometry.bytes_of(chunk);
        std::uint64_t rounded = round_up(count, kPage);
        Mapping window;
        if (Error error =
                Mapping::shared(request.source_fd, request.source_offset + start, rounded, false, window)) {
            return error;
        }
        result.checksums[chunk] = audit.add(chunk, window.data());
        if (Error error = file.write(window.data(), rounded, start)) return error;
        report_progress(request.progress, count);
        return {};
    };
    return each_chunk(geometry.num_chunks(), requests_in_flight(request.threads), [&] { return one; });
}

Error finish(BlockFile& file, std::uint64_t num_bytes) {
    if (::ftruncate(file.fd(), static_cast<off_t>(num_bytes)) != 0)
        return last_os_error("set the length", file.path());
    // Sync before a commit can name this file: otherwise a power failure could leave a hole in a committed
    // step.
    if (::fdatasync(file.fd()) != 0) return last_os_error("sync", file.path());
    // Drop the synced pages from the cache, where they would count as used memory.
    if (!file.direct()) ::posix_fadvise(file.fd(), 0, 0, POSIX_FADV_DONTNEED);
    return {};
}

Error fill(const WriteRequest& request, BlockFile& file, WriteResult& result) {
    if (Error error = prepare(file, request.geometry.num_bytes)) return error;
    Audit audit(request.geometry);
    result.checksums.resize(request.geometry.num_chunks());
    if (Error error = write_chunks(request, file, audit, result)) return error;
    if (Error error = finish(file, request.geometry.num_bytes)) return error;
    result.digests = audit.digests();
    result.direct = file.direct();
    return {};
}

} // namespace

Error write_file(const WriteRequest& request, WriteResult& result) {
    if (Error error = check_request(request)) return error;
    Fd fd;
    if (Error error = create(request.path, fd)) return error;
    BlockFile file(std::move(fd), request.path);
    file.ask_direct(request.direct);
    if (Error error = fill(request, file, result)) {
        remove_begun(file.fd(), request.path);
        return error;
    }
    // A second descriptor identifies the file if closing fails.
    Fd witness(::fcntl(file.fd(), F_DUPFD_CLOEXEC, 0));
    Error error = file.close();
    if (error && witness) remove_begun(witness.get(), request.path);
    return error;
}

} // namespace flashckpt
