// Byte planes.
#include "bindings/arguments.h"

#include "planes/planes.h"

namespace flashckpt {
namespace {

using Rearrange = void (*)(const std::uint8_t*, std::size_t, int, std::uint8_t*);

void rearranged(Rearrange rearrange, nb::handle source, int width, nb::handle destination) {
    if (width != 1 && width != 2 && width != 4 && width != 8) raise_value("a number has 1, 2, 4 or 8 bytes");
    BytesView from(source);
    BytesView into(destination, PyBUF_WRITABLE);
    if (from.num_bytes() != into.num_bytes()) raise_value("source and destination differ in length");
    if (from.num_bytes() == 0) return;
    Released released;
    rearrange(static_cast<const std::uint8_t*>(from.data()), from.num_bytes(), width,
              static_cast<std::uint8_t*>(into.data()));
}

} // namespace

void bind_planes(nb::module_& module) {
    module.def(
        "split_planes",
        [](nb::handle source, int width, nb::handle planes) {
            rearranged(split_planes, source, width, planes);
        },
        nb::arg("source"), nb::arg("width"), nb::arg("planes"));
    module.def(
        "join_planes",
        [](nb::handle planes, int width, nb::handle destination) {
            rearranged(join_planes, planes, width, destination);
        },
        nb::arg("planes"), nb::arg("width"), nb::arg("destination"));
}

} // namespace flashckpt
