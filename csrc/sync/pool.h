// The process's native threads for long work. They start when first used, never before, and a forked child
// that uses them gets its own.
#pragma once

#include "base/signals.h"

#include <functional>

namespace flashckpt {

// Runs `work` on this thread and on up to `threads - 1` others at the same time, and returns when all of
// them have left it. `work` takes its turns from a counter of its own: with no other thread to be had, one
// call does everything. What it throws, on whichever thread, is thrown here once all have left it.
void parallel(int threads, const std::function<void()>& work);

// At most 15 characters are kept.
void name_this_thread(const char* name);

} // namespace flashckpt
