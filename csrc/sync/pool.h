// The process's native threads for long work. They start at first use; a forked child starts its own.
#pragma once

#include "base/signals.h"

#include <functional>

namespace flashckpt {

// Runs `work` concurrently on this thread and on up to `threads - 1` others, and returns when all are done.
// `work` takes its tasks from its own counter, so one call does everything if no other thread is available.
// Rethrows the first exception of any thread once all are done.
void parallel(int threads, const std::function<void()>& work);

// At most 15 characters are kept.
void name_this_thread(const char* name);

} // namespace flashckpt
