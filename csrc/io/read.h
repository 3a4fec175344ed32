// A file read back, into memory or into nothing, while every chunk is verified.
#pragma once

#include "io/audit.h"

#include <cstdint>
#include <string>
#include <vector>

namespace flashckpt {

struct ReadRequest {
    std::string path;
    std::uint64_t file_offset = 0; // a multiple of 4096; what counts below starts here
    Geometry geometry;
    std::vector<Checksum> checksums; // one a chunk
    int threads = 2;
    bool direct = true;
    std::uint64_t progress = 0; // 0, or an address whose u64 grows by the bytes done
    // Where the bytes go, and how many may go there: more than the geometry's, up to whole pages, where the
    // last request may be a direct one. Null: bytes are verified and kept nowhere.
    std::uint8_t* target = nullptr;
    std::uint64_t target_bytes = 0;
    std::uint64_t cancel = 0; // 0, or the address of a u64: once that is not 0, no chunk is begun (ECANCELED)
};

struct ReadResult {
    std::vector<std::uint64_t> digests;    // one a leaf, of the bytes that were read
    std::vector<std::uint64_t> bad_chunks; // in order
    bool direct = false;
};

// A file of another length than asked for is a value error, and nothing of it is read.
Error read_file(const ReadRequest& request, ReadResult& result);

} // namespace flashckpt
