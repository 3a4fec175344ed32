// The needed chunks of one file, and the destinations of their bytes. Reads each chunk once, verifies its
// checksum, adds it to the digests, and copies it to its destinations. Owns the arithmetic of strided copies.
#pragma once

#include "base/error.h"
#include "io/audit.h"
#include "io/blocks.h"

#include <atomic>
#include <cstdint>
#include <memory>
#include <shared_mutex>
#include <string>
#include <utility>
#include <vector>

namespace flashckpt {

// A number of repetitions, and the distance from one to the next in the file and in memory, in bytes.
struct Step {
    std::uint64_t count = 0;
    std::uint64_t source = 0;
    std::uint64_t target = 0;
};

// Copies `run` bytes at `source` of the file to `target`, repeated by the steps, outermost first.
struct Copy {
    std::uint64_t source = 0;
    std::uint8_t* target = nullptr;
    std::uint64_t run = 0;
    std::vector<Step> steps;
    std::vector<std::uint64_t> extents; // bytes of the file from the first to the last of steps [i, …)
};

// All destinations must stay mapped while chunks are added, or until the plan is closed. A chunk is read into
// a buffer, and copied to its destinations after its checksum is verified: no byte of a bad chunk reaches a
// destination.
class FilePlan {
  public:
    // `parts`: digested parts of the file. `ranges`: further needed bytes, as start and stop. `direct`: read
    // past the page cache if the file system allows it. `progress`: 0, or an address whose u64 grows by the
    // bytes done, until the plan is closed.
    FilePlan(Geometry geometry, std::vector<Checksum> checksums, std::vector<Copy> copies,
             std::vector<LeafPart> parts, const std::vector<std::pair<std::uint64_t, std::uint64_t>>& ranges,
             std::shared_ptr<PieceDigests> digests, bool direct = true, std::uint64_t progress = 0);
    FilePlan(const FilePlan&) = delete;
    FilePlan& operator=(const FilePlan&) = delete;

    // An error for invalid arguments; after it, call no other method.
    const Error& error() const { return error_; }
    const Geometry& geometry() const { return geometry_; }

    // The needed chunks that were not added yet, as ranges (start, stop).
    std::vector<std::pair<std::uint64_t, std::uint64_t>> left() const;
    // The chunks with a wrong checksum, in order.
    std::vector<std::uint64_t> bad_chunks() const;

    // Reads the chunks that are left. Returns a value error, and reads nothing, for a file of another length;
    // ECANCELED once the plan is closed.
    Error read(const std::string& path, int threads);
    // Adds all bytes of one chunk. Ignores a chunk that is not needed or was already added.
    void add(std::uint64_t chunk, const std::uint8_t* data);

    // Begins no further chunk. Afterwards no thread writes to a destination, also one whose read ends later.
    void close();
    bool is_closed() const { return is_closed_.load(); }

  private:
    struct Need {
        std::uint64_t chunk = 0;
        std::vector<std::uint32_t> copies;
        std::atomic<std::uint8_t> state{0};
    };
    Error check(const std::vector<std::pair<std::uint64_t, std::uint64_t>>& ranges);
    void find(const std::vector<std::pair<std::uint64_t, std::uint64_t>>& ranges);
    Need* need_of(std::uint64_t chunk);
    void take(Need& need, const std::uint8_t* data);

    Geometry geometry_;
    std::vector<Checksum> checksums_;
    std::vector<Copy> copies_;
    Audit audit_;
    bool direct_;
    std::uint64_t progress_;
    std::atomic<bool> is_closed_{false};
    std::shared_mutex writing_; // shared by those that write to destinations
    Error error_;
    std::unique_ptr<Need[]> needs_; // by chunk
    std::size_t num_needs_ = 0;
};

} // namespace flashckpt
