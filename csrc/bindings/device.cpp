// CUDA, if there is a device.
#include "bindings/arguments.h"

#include "device/copies.h"
#include "device/cuda.h"
#include "device/cuda_digest.h"

#include <nanobind/stl/optional.h>

#include <optional>
#include <vector>

namespace flashckpt {
namespace {

nb::tuple pci_address(int device) {
    int address[3] = {0, 0, 0};
    Error error;
    {
        Released released; // the first call starts the driver
        error = cuda_pci_address(device, address);
    }
    raise_if(error);
    return nb::make_tuple(address[0], address[1], address[2]);
}

bool is_capturing(nb::handle streams, int device) {
    U64View asked(streams);
    bool capturing = false;
    raise_if(cuda_capturing(asked.data(), asked.size(), device, capturing));
    return capturing;
}

// Owns copies and their handle. A seal that waits for them still completes after this object is destroyed.
class CopiesObject {
  public:
    CopiesObject(int device, std::uint64_t piece_bytes) {
        Error error;
        {
            Released released;
            error = DeviceCopies::make(device, piece_bytes, copies_);
        }
        raise_if(error);
        handle_ = enroll(copies_);
    }
    ~CopiesObject() { retire(handle_); }
    CopiesObject(const CopiesObject&) = delete;
    CopiesObject& operator=(const CopiesObject&) = delete;

    std::uint64_t handle() const { return handle_; }

    std::uint64_t submit(nb::handle sources, nb::handle destinations, nb::handle sizes, std::size_t num_first,
                         std::uint64_t after) {
        CopyJob job{U64View(sources).copy(), U64View(destinations).copy(), U64View(sizes).copy(), num_first};
        std::uint64_t ticket = 0;
        raise_if(copies_->submit(std::move(job), after, ticket));
        return ticket;
    }
    void hold(std::uint64_t ticket, nb::handle streams) {
        U64View held(streams);
        call([&] { return copies_->hold(ticket, held.data(), held.size()); });
    }
    void wait(std::uint64_t ticket, bool first) {
        call([&] { return first ? copies_->wait_first(ticket) : copies_->wait(ticket); });
    }
    void close() {
        Released released;
        copies_->close();
    }

  private:
    template <class Call>
    void call(Call call) {
        Error error;
        {
            Released released;
            error = call();
        }
        raise_if(error);
    }

    std::shared_ptr<DeviceCopies> copies_;
    std::uint64_t handle_ = 0;
};

nb::bytes make_digest_table(nb::handle sources, nb::handle destinations, nb::handle sizes) {
    U64View from(sources);
    U64View bytes(sizes);
    std::optional<U64View> to;
    if (!destinations.is_none()) to.emplace(destinations);
    if (from.size() != bytes.size() || (to && to->size() != bytes.size())) {
        raise_value("sources, destinations and sizes differ in length");
    }
    std::vector<std::uint8_t> table;
    Error error;
    {
        Released released;
        error = digest_table(from.data(), to ? to->data() : nullptr, bytes.data(), bytes.size(), table);
    }
    raise_if(error);
    return bytes_of(table.data(), table.size());
}

void launch_digests(std::uint64_t stream, std::uint64_t table_device_address, std::size_t num_entries,
                    std::uint64_t digests_device_address, int device) {
    Error error;
    {
        Released released;
        error = cuda_digest_launch(stream, table_device_address, num_entries, digests_device_address, device);
    }
    raise_if(error);
}

nb::str why_no_digests(int device) {
    Error error;
    {
        Released released;
        error = cuda_digests_usable(device);
    }
    return nb::str(error.message.c_str());
}

} // namespace

void bind_device(nb::module_& module) {
    nb::class_<CopiesObject>(module, "CudaCopies")
        .def(nb::init<int, std::uint64_t>(), nb::arg("device"), nb::arg("piece_bytes"))
        .def_prop_ro("handle", &CopiesObject::handle)
        .def("submit", &CopiesObject::submit, nb::arg("sources"), nb::arg("destinations"), nb::arg("sizes"),
             nb::arg("num_first"), nb::arg("after") = 0)
        .def("hold", &CopiesObject::hold, nb::arg("ticket"), nb::arg("streams"))
        .def("wait", &CopiesObject::wait, nb::arg("ticket"), nb::kw_only(), nb::arg("first") = false)
        .def("close", &CopiesObject::close);
    module.def("cuda_capturing", is_capturing, nb::arg("streams"), nb::arg("device"));
    module.def("cuda_elapsed_s", cuda_elapsed_s, nb::arg("start"), nb::arg("end"), nb::arg("device"));
    module.def("cuda_available", cuda_available, nb::call_guard<Released>());
    module.def("cuda_pci_address", pci_address, nb::arg("device"));
    module.def("cuda_digest_table", make_digest_table, nb::arg("sources"), nb::arg("destinations").none(),
               nb::arg("sizes"));
    module.def("cuda_digest_launch", launch_digests, nb::arg("stream"), nb::arg("table_device_address"),
               nb::arg("num_entries"), nb::arg("digests_device_address"), nb::arg("device"));
    module.def("cuda_digests_usable", why_no_digests, nb::arg("device"));
}

} // namespace flashckpt
