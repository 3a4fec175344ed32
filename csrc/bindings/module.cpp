#include "bindings/arguments.h"

NB_MODULE(_native, module) {
    // A sealer or an event that lives in a global is not a leak worth a word at exit.
    nanobind::set_leak_warnings(false);
    flashckpt::bind_bytes(module);
    flashckpt::bind_memory(module);
    flashckpt::bind_files(module);
    flashckpt::bind_planes(module);
    flashckpt::bind_sync(module);
    flashckpt::bind_device(module);
    flashckpt::bind_watch(module);
    flashckpt::bind_standing(module);
}
