// Writing, reading and checking shards.
#include "bindings/arguments.h"

#include "base/posix.h"
#include "io/read.h"
#include "io/write.h"

#include <cstring>
#include <optional>

namespace flashckpt {
namespace {

Geometry geometry_of(std::uint64_t num_bytes, std::uint64_t chunk_bytes, nb::handle offsets,
                     nb::handle sizes) {
    return {num_bytes, chunk_bytes, U64View(offsets).copy(), U64View(sizes).copy()};
}

int checked_threads(int threads) {
    if (threads < 1) raise_value("threads must be at least 1");
    return threads;
}

nb::bytes digest_bytes(const std::vector<std::uint64_t>& digests) {
    return bytes_of(digests.data(), digests.size() * 8);
}

nb::tuple write_one(nb::handle path, int source_fd, std::uint64_t source_offset, std::uint64_t num_bytes,
                    std::uint64_t chunk_bytes, nb::handle leaf_offsets, nb::handle leaf_sizes, int threads,
                    bool direct, std::uint64_t progress) {
    WriteRequest request{path_of(path),
                         source_fd,
                         source_offset,
                         geometry_of(num_bytes, chunk_bytes, leaf_offsets, leaf_sizes),
                         checked_threads(threads),
                         direct,
                         progress};
    if (progress != 0) u64_pointer(progress);
    WriteResult result;
    Error error;
    {
        Released released;
        error = write_file(request, result);
    }
    raise_if(error);
    return nb::make_tuple(digest_bytes(result.digests),
                          bytes_of(result.checksums.data(), result.checksums.size() * sizeof(Checksum)),
                          result.direct);
}

std::vector<Checksum> checksums_of(nb::handle object) {
    BytesView view(object);
    if (view.num_bytes() % sizeof(Checksum) != 0) raise_value("checksums must be 16 bytes for each chunk");
    std::vector<Checksum> checksums(view.num_bytes() / sizeof(Checksum));
    if (!checksums.empty()) std::memcpy(checksums.data(), view.data(), view.num_bytes());
    return checksums;
}

nb::tuple read_one(const ReadRequest& request) {
    if (request.progress != 0) u64_pointer(request.progress);
    if (request.cancel != 0) u64_pointer(request.cancel);
    ReadResult result;
    Error error;
    {
        Released released;
        error = read_file(request, result);
    }
    raise_if(error);
    nb::list bad;
    for (std::uint64_t chunk : result.bad_chunks)
        bad.append(chunk);
    return nb::make_tuple(digest_bytes(result.digests), bad, result.direct);
}

nb::tuple read_into(nb::handle path, nb::handle into, std::uint64_t file_offset, std::uint64_t num_bytes,
                    std::uint64_t chunk_bytes, nb::handle checksums, nb::handle leaf_offsets,
                    nb::handle leaf_sizes, int threads, bool direct, std::uint64_t progress,
                    std::uint64_t cancel) {
    BytesView target(into, PyBUF_WRITABLE); // held until all is read: nobody unmaps it meanwhile
    return read_one({path_of(path), file_offset,
                     geometry_of(num_bytes, chunk_bytes, leaf_offsets, leaf_sizes), checksums_of(checksums),
                     checked_threads(threads), direct, progress, static_cast<std::uint8_t*>(target.data()),
                     target.num_bytes(), cancel});
}

nb::tuple check(nb::handle path, std::uint64_t num_bytes, std::uint64_t chunk_bytes, nb::handle checksums,
                nb::handle leaf_offsets, nb::handle leaf_sizes, int threads, bool direct,
                std::uint64_t progress, std::uint64_t cancel) {
    return read_one({path_of(path), 0, geometry_of(num_bytes, chunk_bytes, leaf_offsets, leaf_sizes),
                     checksums_of(checksums), checked_threads(threads), direct, progress, nullptr, 0,
                     cancel});
}

// Chunks that come from elsewhere than a file: each once, in any order and from any thread.
class ChunkAudit {
  public:
    ChunkAudit(std::uint64_t num_bytes, std::uint64_t chunk_bytes, nb::handle leaf_offsets,
               nb::handle leaf_sizes)
        : geometry_(geometry_of(num_bytes, chunk_bytes, leaf_offsets, leaf_sizes)) {
        raise_if(geometry_.check());
        audit_.emplace(geometry_);
    }

    nb::bytes add(std::uint64_t offset, nb::handle data, nb::handle into) {
        BytesView source(data);
        std::optional<BytesView> target;
        if (!into.is_none()) target.emplace(into, PyBUF_WRITABLE);
        check(offset, source.num_bytes());
        if (target && target->num_bytes() != source.num_bytes()) raise_value("into has another length");
        const auto* from = static_cast<const std::uint8_t*>(source.data());
        auto* to = target ? static_cast<std::uint8_t*>(target->data()) : nullptr;
        const std::uint64_t first = offset / geometry_.chunk_bytes;
        std::vector<Checksum> sums(round_up(source.num_bytes(), geometry_.chunk_bytes) /
                                   geometry_.chunk_bytes);
        {
            Released released;
            for (std::size_t i = 0; i < sums.size(); ++i) {
                const std::uint64_t begin = i * geometry_.chunk_bytes;
                sums[i] = audit_->add(first + i, from + begin, to == nullptr ? nullptr : to + begin);
            }
        }
        return bytes_of(sums.data(), sums.size() * sizeof(Checksum));
    }

    nb::bytes digests() const { return digest_bytes(audit_->digests()); }

  private:
    void check(std::uint64_t offset, std::uint64_t num_bytes) const {
        if (offset > geometry_.num_bytes || num_bytes > geometry_.num_bytes - offset) {
            raise_value("these bytes end beyond the last one");
        }
        bool is_last = offset + num_bytes == geometry_.num_bytes;
        if (offset % geometry_.chunk_bytes != 0 || (num_bytes % geometry_.chunk_bytes != 0 && !is_last)) {
            raise_value("these are no whole chunks");
        }
    }

    Geometry geometry_;
    std::optional<Audit> audit_;
};

} // namespace

void bind_files(nb::module_& module) {
    nb::class_<ChunkAudit>(module, "Audit")
        .def(nb::init<std::uint64_t, std::uint64_t, nb::handle, nb::handle>(), nb::kw_only(),
             nb::arg("num_bytes"), nb::arg("chunk_bytes"), nb::arg("leaf_offsets"), nb::arg("leaf_sizes"))
        .def("add", &ChunkAudit::add, nb::arg("offset"), nb::arg("data"), nb::arg("into") = nb::none())
        .def("digests", &ChunkAudit::digests);
    module.def("write_file", write_one, nb::arg("path"), nb::arg("source_fd"), nb::arg("source_offset"),
               nb::arg("num_bytes"), nb::kw_only(), nb::arg("chunk_bytes") = 4 << 20, nb::arg("leaf_offsets"),
               nb::arg("leaf_sizes"), nb::arg("threads") = 2, nb::arg("direct") = true,
               nb::arg("progress") = 0);
    module.def("read_file", read_into, nb::arg("path"), nb::arg("into"), nb::kw_only(),
               nb::arg("file_offset") = 0, nb::arg("num_bytes"), nb::arg("chunk_bytes") = 4 << 20,
               nb::arg("checksums"), nb::arg("leaf_offsets"), nb::arg("leaf_sizes"), nb::arg("threads") = 2,
               nb::arg("direct") = true, nb::arg("progress") = 0, nb::arg("cancel") = 0);
    module.def("check_file", check, nb::arg("path"), nb::kw_only(), nb::arg("num_bytes"),
               nb::arg("chunk_bytes") = 4 << 20, nb::arg("checksums"), nb::arg("leaf_offsets"),
               nb::arg("leaf_sizes"), nb::arg("threads") = 2, nb::arg("direct") = true,
               nb::arg("progress") = 0, nb::arg("cancel") = 0);
}

} // namespace flashckpt
