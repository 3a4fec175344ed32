#include "io/read.h"

#include "base/posix.h"
#include "io/blocks.h"
#include "io/chunks.h"

#include <cerrno>
#include <memory>
#include <unistd.h>

namespace flashckpt {
namespace {

constexpr ::useconds_t kLookAgainUs = 500;

// Whether the region has the bytes up to `end`: one that is growing is waited for, and not written once it is
// given up, whatever it has by then: who gave it up waits for this.
Error await_target(const ReadRequest& request, std::uint64_t end) {
    for (;;) {
        if (request.growing != 0 &&
            __atomic_load_n(reinterpret_cast<std::uint64_t*>(request.growing), __ATOMIC_ACQUIRE) != 0) {
            return os_error(ECANCELED, "the target region was given up", request.path);
        }
        std::uint64_t size = 0;
        if (Error error = regular_size(request.target_fd, "", size)) return error;
        if (end <= size) return {};
        if (request.growing == 0) {
            return os_error(EFAULT, "the target region ends before the bytes that are to be read",
                            request.path);
        }
        ::usleep(kLookAgainUs);
    }
}

Error check_target(const ReadRequest& request) {
    if (request.target_fd < 0 || request.growing != 0) return {};
    std::uint64_t end = request.target_offset + request.geometry.num_bytes;
    if (end < request.target_offset) return value_error("target_offset is too large");
    return await_target(request, end);
}

Error check_request(const ReadRequest& request) {
    if (Error error = request.geometry.check()) return error;
    auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
    if (request.target_offset % page != 0) return value_error("target_offset must be a multiple of the page");
    if (request.geometry.chunk_bytes % page != 0)
        return value_error("chunk_bytes must be a multiple of the page");
    if (request.file_offset % kPage != 0 || request.file_offset > (1ull << 62)) {
        return value_error("file_offset must be a multiple of 4096");
    }
    if (request.checksums.size() != request.geometry.num_chunks()) {
        return value_error("there must be one checksum of 16 bytes for each of the " +
                           std::to_string(request.geometry.num_chunks()) + " chunks");
    }
    return check_target(request);
}

Error check_length(const BlockFile& file, const ReadRequest& request) {
    std::uint64_t size = 0;
    if (Error error = regular_size(file.fd(), request.path, size)) return error;
    std::uint64_t wanted = request.file_offset + request.geometry.num_bytes;
    if (size == wanted) return {};
    return value_error(request.path + " has " + std::to_string(size) + " bytes where " +
                       std::to_string(wanted) + " were written");
}

// Where one thread's chunks arrive: a window of the region, or a buffer used again and again.
class Landing {
  public:
    explicit Landing(const ReadRequest& request) : request_(request) {}

    Error open(std::uint64_t chunk, std::uint64_t num_bytes, std::uint8_t*& out) {
        if (Error error = map(chunk, num_bytes)) return error;
        out = memory_.data();
        return {};
    }

  private:
    Error map(std::uint64_t chunk, std::uint64_t num_bytes) {
        if (request_.target_fd >= 0) {
            std::uint64_t offset = request_.target_offset + chunk * request_.geometry.chunk_bytes;
            if (Error error = await_target(request_, offset + request_.geometry.bytes_of(chunk)))
                return error;
            return Mapping::shared(request_.target_fd, offset, num_bytes, true, memory_);
        }
        if (memory_.size() >= num_bytes) return {};
        return Mapping::anonymous(num_bytes, memory_);
    }

    const ReadRequest& request_;
    Mapping memory_;
};

Error read_chunks(const ReadRequest& request, BlockFile& file, Audit& audit, std::vector<std::uint8_t>& bad) {
    const Geometry& geometry = request.geometry;
    auto make = [&]() -> ChunkWork {
        return [&, landing = std::make_shared<Landing>(request)](std::uint64_t chunk) -> Error {
            std::uint64_t count = geometry.bytes_of(chunk);
            std::uint64_t room = round_up(count, kPage);
            std::uint8_t* data = nullptr;
            if (Error error = landing->open(chunk, room, data)) return error;
            std::uint64_t start = request.file_offset + chunk * geometry.chunk_bytes;
            if (Error error = file.read(data, count, room, start)) return error;
            bad[chunk] = audit.add(chunk, data) != request.checksums[chunk];
            report_progress(request.progress, count);
            return {};
        };
    };
    // Buffers of our own are memory that counts; windows of a region are not.
    bool buffered = request.target_fd < 0;
    int workers = buffered ? request.threads * 2 : requests_in_flight(request.threads);
    return each_chunk(geometry.num_chunks(), workers, make);
}

} // namespace

Error read_file(const ReadRequest& request, ReadResult& result) {
    if (Error error = check_request(request)) return error;
    Fd fd;
    if (Error error = open_to_read(request.path, fd)) return error;
    BlockFile file(std::move(fd), request.path);
    if (Error error = check_length(file, request)) return error;
    file.ask_direct(request.direct);
    Audit audit(request.geometry);
    std::vector<std::uint8_t> bad(request.geometry.num_chunks()); // not bool: threads write their own
    if (Error error = read_chunks(request, file, audit, bad)) return error;
    for (std::uint64_t chunk = 0; chunk < bad.size(); ++chunk) {
        if (bad[chunk] != 0) result.bad_chunks.push_back(chunk);
    }
    result.digests = audit.digests();
    result.direct = file.direct();
    return {};
}

} // namespace flashckpt
