#include "io/read.h"

#include "base/posix.h"
#include "io/blocks.h"
#include "io/chunks.h"

#include <algorithm>
#include <cerrno>
#include <memory>
#include <unistd.h>

namespace flashckpt {
namespace {

Error check_request(const ReadRequest& request) {
    if (Error error = request.geometry.check()) return error;
    auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
    if (request.target != nullptr && request.target_bytes < request.geometry.num_bytes) {
        return value_error("there is less room than bytes to be read");
    }
    if (request.geometry.chunk_bytes % page != 0)
        return value_error("chunk_bytes must be a multiple of the page");
    if (request.file_offset % kPage != 0 || request.file_offset > (1ull << 62)) {
        return value_error("file_offset must be a multiple of 4096");
    }
    if (request.checksums.size() != request.geometry.num_chunks()) {
        return value_error("there must be one checksum of 16 bytes for each of the " +
                           std::to_string(request.geometry.num_chunks()) + " chunks");
    }
    return {};
}

Error check_length(const BlockFile& file, const ReadRequest& request) {
    std::uint64_t size = 0;
    if (Error error = regular_size(file.fd(), request.path, size)) return error;
    std::uint64_t wanted = request.file_offset + request.geometry.num_bytes;
    if (size == wanted) return {};
    return value_error(request.path + " has " + std::to_string(size) + " bytes where " +
                       std::to_string(wanted) + " were written");
}

Error check_cancel(const ReadRequest& request) {
    if (request.cancel == 0) return {};
    auto* word = reinterpret_cast<std::uint64_t*>(request.cancel);
    if (__atomic_load_n(word, __ATOMIC_ACQUIRE) == 0) return {};
    return os_error(ECANCELED, "nobody wants what is read any more", request.path);
}

// Where a chunk is to arrive, and how many bytes may: its place in the target, or `buffer`, which is its
// thread's.
Error place_of(const ReadRequest& request, std::uint64_t chunk, Mapping& buffer, std::uint8_t*& data,
               std::uint64_t& room) {
    room = round_up(request.geometry.bytes_of(chunk), kPage);
    if (request.target != nullptr) {
        std::uint64_t offset = chunk * request.geometry.chunk_bytes;
        data = request.target + offset;
        room = std::min(room, request.target_bytes - offset);
        return {};
    }
    if (buffer.size() < room) {
        if (Error error = Mapping::anonymous(room, buffer)) return error;
    }
    data = buffer.data();
    return {};
}

Error read_chunks(const ReadRequest& request, BlockFile& file, Audit& audit, std::vector<std::uint8_t>& bad) {
    const Geometry& geometry = request.geometry;
    auto make = [&]() -> ChunkWork {
        return [&, buffer = std::make_shared<Mapping>()](std::uint64_t chunk) -> Error {
            if (Error error = check_cancel(request)) return error;
            std::uint64_t room = 0;
            std::uint8_t* data = nullptr;
            if (Error error = place_of(request, chunk, *buffer, data, room)) return error;
            std::uint64_t count = geometry.bytes_of(chunk);
            std::uint64_t start = request.file_offset + chunk * geometry.chunk_bytes;
            if (Error error = file.read(data, count, room, start)) return error;
            bad[chunk] = audit.add(chunk, data) != request.checksums[chunk];
            report_progress(request.progress, count);
            return {};
        };
    };
    // Buffers of our own are memory that counts; the target's is there.
    bool buffered = request.target == nullptr;
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
