// Writing, reading and checking shards.
#include "bindings/arguments.h"

#include "base/posix.h"
#include "io/plan.h"
#include "io/write.h"

#include <cstring>
#include <memory>
#include <optional>
#include <utility>

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

void check_chunks(const Geometry& geometry, std::uint64_t offset, std::uint64_t num_bytes) {
    if (offset > geometry.num_bytes || num_bytes > geometry.num_bytes - offset)
        raise_value("these bytes end beyond the last one");
    bool is_last = offset + num_bytes == geometry.num_bytes;
    if (offset % geometry.chunk_bytes != 0 || (num_bytes % geometry.chunk_bytes != 0 && !is_last))
        raise_value("these are no whole chunks");
}

// Digests of leaves, to which several plans may add.
class LeafDigests {
  public:
    explicit LeafDigests(nb::handle sizes) : found_(std::make_shared<PieceDigests>(U64View(sizes).copy())) {}

    nb::bytes digests() const { return digest_bytes(found_->digests()); }
    const std::shared_ptr<PieceDigests>& shared() const { return found_; }

  private:
    std::shared_ptr<PieceDigests> found_;
};

// Each copy as u64: offset in the file, address, bytes of a run, number of steps, and three numbers per step.
std::vector<Copy> copies_of(nb::handle object) {
    U64View view(object);
    std::vector<Copy> copies;
    for (std::size_t at = 0; at < view.size();) {
        if (view.size() - at < 4) raise_value("copies end in the middle of one");
        const std::uint64_t* row = view.data() + at;
        Copy copy;
        copy.source = row[0];
        copy.target = reinterpret_cast<std::uint8_t*>(row[1]);
        copy.run = row[2];
        if (row[3] > (view.size() - at - 4) / 3) raise_value("copies end in the middle of one");
        for (std::uint64_t i = 0; i < row[3]; ++i)
            copy.steps.push_back({row[4 + 3 * i], row[5 + 3 * i], row[6 + 3 * i]});
        at += 4 + 3 * row[3];
        copies.push_back(std::move(copy));
    }
    return copies;
}

std::vector<LeafPart> parts_of(nb::handle object) {
    U64View view(object);
    if (view.size() % 4 != 0) raise_value("parts end in the middle of one");
    std::vector<LeafPart> parts(view.size() / 4);
    for (std::size_t i = 0; i < parts.size(); ++i) {
        const std::uint64_t* row = view.data() + 4 * i;
        parts[i] = {row[0], row[1], static_cast<std::size_t>(row[2]), row[3]};
    }
    return parts;
}

std::vector<std::pair<std::uint64_t, std::uint64_t>> ranges_of(nb::handle object) {
    U64View view(object);
    if (view.size() % 2 != 0) raise_value("ranges end in the middle of one");
    std::vector<std::pair<std::uint64_t, std::uint64_t>> ranges(view.size() / 2);
    for (std::size_t i = 0; i < ranges.size(); ++i)
        ranges[i] = {view.data()[2 * i], view.data()[2 * i + 1]};
    return ranges;
}

class Plan {
  public:
    Plan(std::uint64_t num_bytes, std::uint64_t chunk_bytes, nb::handle checksums, nb::handle copies,
         nb::handle parts, nb::handle ranges, const LeafDigests& digests, bool direct, std::uint64_t progress)
        : plan_(Geometry{num_bytes, chunk_bytes, {}, {}}, checksums_of(checksums), copies_of(copies),
                parts_of(parts), ranges_of(ranges), digests.shared(), direct, progress) {
        if (progress != 0) u64_pointer(progress);
        raise_if(plan_.error());
    }

    std::uint64_t num_bytes() const { return plan_.geometry().num_bytes; }
    std::uint64_t chunk_bytes() const { return plan_.geometry().chunk_bytes; }

    nb::list left() const {
        nb::list runs;
        for (const auto& [first, last] : plan_.left())
            runs.append(nb::make_tuple(first, last));
        return runs;
    }

    nb::list bad_chunks() const {
        nb::list chunks;
        for (std::uint64_t chunk : plan_.bad_chunks())
            chunks.append(chunk);
        return chunks;
    }

    void read(nb::handle path, int threads) {
        const std::string local = path_of(path);
        checked_threads(threads);
        Error error;
        {
            Released released;
            error = plan_.read(local, threads);
        }
        raise_if(error);
    }

    void add(std::uint64_t offset, nb::handle data) {
        BytesView view(data);
        check_chunks(plan_.geometry(), offset, view.num_bytes());
        const std::uint64_t chunk_bytes = plan_.geometry().chunk_bytes;
        Released released;
        for (std::uint64_t at = 0; at < view.num_bytes(); at += chunk_bytes)
            plan_.add((offset + at) / chunk_bytes, static_cast<const std::uint8_t*>(view.data()) + at);
    }

    bool is_closed() const { return plan_.is_closed(); }

    // Keeps the GIL: no signal's handler runs between two plans.
    static void close(const nb::list& plans) {
        for (nb::handle each : plans)
            nb::cast<Plan&>(each).plan_.close();
    }

  private:
    FilePlan plan_;
};

// Audits chunks that do not come from a file: each chunk once, in any order and from any thread.
class ChunkAudit {
  public:
    ChunkAudit(std::uint64_t num_bytes, std::uint64_t chunk_bytes, nb::handle leaf_offsets,
               nb::handle leaf_sizes)
        : geometry_(geometry_of(num_bytes, chunk_bytes, leaf_offsets, leaf_sizes)) {
        raise_if(geometry_.check());
        audit_.emplace(geometry_);
    }

    nb::bytes add(std::uint64_t offset, nb::handle data) {
        BytesView source(data);
        check_chunks(geometry_, offset, source.num_bytes());
        const auto* from = static_cast<const std::uint8_t*>(source.data());
        const std::uint64_t first = offset / geometry_.chunk_bytes;
        std::vector<Checksum> sums(round_up(source.num_bytes(), geometry_.chunk_bytes) /
                                   geometry_.chunk_bytes);
        {
            Released released;
            for (std::size_t i = 0; i < sums.size(); ++i)
                sums[i] = audit_->add(first + i, from + i * geometry_.chunk_bytes);
        }
        return bytes_of(sums.data(), sums.size() * sizeof(Checksum));
    }

    nb::bytes digests() const { return digest_bytes(audit_->digests()); }

  private:
    Geometry geometry_;
    std::optional<Audit> audit_;
};

} // namespace

void bind_files(nb::module_& module) {
    nb::class_<ChunkAudit>(module, "Audit")
        .def(nb::init<std::uint64_t, std::uint64_t, nb::handle, nb::handle>(), nb::kw_only(),
             nb::arg("num_bytes"), nb::arg("chunk_bytes"), nb::arg("leaf_offsets"), nb::arg("leaf_sizes"))
        .def("add", &ChunkAudit::add, nb::arg("offset"), nb::arg("data"))
        .def("digests", &ChunkAudit::digests);
    module.def("write_file", write_one, nb::arg("path"), nb::arg("source_fd"), nb::arg("source_offset"),
               nb::arg("num_bytes"), nb::kw_only(), nb::arg("chunk_bytes") = 4 << 20, nb::arg("leaf_offsets"),
               nb::arg("leaf_sizes"), nb::arg("threads") = 2, nb::arg("direct") = true,
               nb::arg("progress") = 0);
    nb::class_<LeafDigests>(module, "LeafDigests")
        .def(nb::init<nb::handle>(), nb::arg("sizes"))
        .def("digests", &LeafDigests::digests);
    nb::class_<Plan>(module, "FilePlan")
        .def(nb::init<std::uint64_t, std::uint64_t, nb::handle, nb::handle, nb::handle, nb::handle,
                      const LeafDigests&, bool, std::uint64_t>(),
             nb::kw_only(), nb::arg("num_bytes"), nb::arg("chunk_bytes"), nb::arg("checksums"),
             nb::arg("copies"), nb::arg("parts"), nb::arg("ranges"), nb::arg("digests"),
             nb::arg("direct") = true, nb::arg("progress") = 0)
        .def_prop_ro("num_bytes", &Plan::num_bytes)
        .def_prop_ro("chunk_bytes", &Plan::chunk_bytes)
        .def("left", &Plan::left)
        .def("bad_chunks", &Plan::bad_chunks)
        .def_prop_ro("is_closed", &Plan::is_closed)
        .def("read", &Plan::read, nb::arg("path"), nb::kw_only(), nb::arg("threads") = 2)
        .def_static("close", &Plan::close, nb::arg("plans"))
        .def("add", &Plan::add, nb::arg("offset"), nb::arg("data"));
}

} // namespace flashckpt
