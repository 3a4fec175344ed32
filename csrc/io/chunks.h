// Distributes chunks over threads until all are done or one fails.
#pragma once

#include "base/error.h"

#include <cstdint>
#include <functional>

namespace flashckpt {

// Processes one chunk; owns its thread's buffers.
using ChunkWork = std::function<Error(std::uint64_t chunk)>;

// Calls `make` once on each of at most `threads` threads, and calls the returned work for the chunks below
// `num_chunks`. Starts no further chunk after an error. Returns the first error when all threads are done.
Error each_chunk(std::uint64_t num_chunks, int threads, const std::function<ChunkWork()>& make);

// Adds to a counter that another process or thread may read; does nothing for address 0.
void report_progress(std::uint64_t address, std::uint64_t num_bytes);

// A thread computes nothing during its request, so there are more threads for requests than `threads`.
// Measured on a busy machine: with two for each, the disk waits for checksums.
int requests_in_flight(int threads);

} // namespace flashckpt
