// A range of a region, written to a new file while it is audited.
#pragma once

#include "io/audit.h"

#include <cstdint>
#include <string>
#include <vector>

namespace flashckpt {

struct WriteRequest {
    std::string path;
    int source_fd = -1;
    std::uint64_t source_offset = 0; // a multiple of the machine's page
    Geometry geometry;
    int threads = 2;
    bool direct = true;
    std::uint64_t progress = 0; // 0, or an address whose u64 grows by the bytes done
};

struct WriteResult {
    std::vector<std::uint64_t> digests; // one a leaf, of the bytes that were written
    std::vector<Checksum> checksums;    // one a chunk
    bool direct = false;
};

// The file is on disk when this returns without an error; its name is not until its folder is synced.
// After an error there is no such file, unless it was there before.
Error write_file(const WriteRequest& request, WriteResult& result);

} // namespace flashckpt
