// CUDA, where there is one.
#include "bindings/arguments.h"

#include "device/cuda.h"

namespace flashckpt {
namespace {

void copy_to_host(std::uint64_t stream, nb::handle sources, nb::handle destinations, nb::handle sizes,
                  std::uint64_t piece_bytes, int device) {
    U64View from(sources);
    U64View to(destinations);
    U64View bytes(sizes);
    if (from.size() != bytes.size() || to.size() != bytes.size()) {
        raise_value("sources, destinations and sizes differ in length");
    }
    Error error;
    {
        Released released;
        error = cuda_copy_to_host(stream, from.data(), to.data(), bytes.data(), bytes.size(), piece_bytes,
                                  device);
    }
    raise_if(error);
}

std::uint64_t event_handle(std::uint64_t event, int device) {
    std::uint64_t handle = 0;
    raise_if(cuda_event_handle(event, device, handle));
    return handle;
}

void register_memory(std::uint64_t address, std::uint64_t num_bytes, int device) {
    Error error;
    {
        Released released;
        error = cuda_register(address, num_bytes, device);
    }
    raise_if(error);
}

void unregister_memory(std::uint64_t address) {
    Error error;
    {
        Released released;
        error = cuda_unregister(address);
    }
    raise_if(error);
}

} // namespace

void bind_device(nb::module_& module) {
    module.def("cuda_available", cuda_available, nb::call_guard<Released>());
    module.def("cuda_register", register_memory, nb::arg("address"), nb::arg("num_bytes"), nb::arg("device"));
    module.def("cuda_unregister", unregister_memory, nb::arg("address"));
    module.def("cuda_event_handle", event_handle, nb::arg("event"), nb::arg("device") = 0);
    module.def("cuda_copy_to_host", copy_to_host, nb::arg("stream"), nb::arg("sources"),
               nb::arg("destinations"), nb::arg("sizes"), nb::arg("piece_bytes"), nb::arg("device"));
}

} // namespace flashckpt
