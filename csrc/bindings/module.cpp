#include "bindings/arguments.h"

NB_MODULE(_native, module) {
    // Do not report a sealer or an event in a global as a leak at exit.
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
