// Writes a range of a region to a new file and audits it on the way.
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
    std::vector<std::uint64_t> digests; // one per leaf, of the written bytes
    std::vector<Checksum> checksums;    // one per chunk
    bool direct = false;
};

// The file's bytes are durable when this returns without an error; its name is durable once the folder is
// synced. After an error the file does not exist, unless it existed before.
Error write_file(const WriteRequest& request, WriteResult& result);

} // namespace flashckpt
