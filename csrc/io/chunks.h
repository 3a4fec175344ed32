// Chunks shared out over threads until all are done or one fails.
#pragma once

#include "base/error.h"

#include <cstdint>
#include <functional>

namespace flashckpt {

// Does one chunk; has its thread's own buffers.
using ChunkWork = std::function<Error(std::uint64_t chunk)>;

// Calls `make` once on each of at most `threads` threads and the work it returns for every chunk below
// `num_chunks`. After an error no further chunk is begun; returns the first error when all threads are done.
Error each_chunk(std::uint64_t num_chunks, int threads, const std::function<ChunkWork()>& make);

// Adds to a counter that another process or thread may read; an address of 0 is none.
void report_progress(std::uint64_t address, std::uint64_t num_bytes);

// While one request is under way its thread computes nothing: so there are more requests than `threads`
// that compute. Measured on a busy machine: with two for each, the disk waits for checksums.
int requests_in_flight(int threads);

} // namespace flashckpt
