// Addresses, digests, checksums and atomics.
#include "bindings/arguments.h"

#include "checksum/xxh3.h"
#include "copy/copy.h"
#include "digest/digest.h"

#include <algorithm>
#include <optional>

namespace flashckpt {
namespace {

// Below this size, releasing the GIL costs more than the work.
constexpr std::size_t kShortBytes = 32 << 10;

class MaybeReleased {
  public:
    explicit MaybeReleased(std::size_t num_bytes) {
        if (num_bytes >= kShortBytes) released_.emplace();
    }

  private:
    std::optional<Released> released_;
};

int checked_threads(int threads) {
    if (threads < 1) raise_value("threads must be at least 1");
    return threads;
}

template <class T>
T* pointer(std::uint64_t address) {
    return reinterpret_cast<T*>(address);
}

// A tensor without memory has address 0, whatever its shape is.
void check_address(std::uint64_t address, std::uint64_t num_bytes) {
    if (address == 0 && num_bytes > 0) raise_value("there are bytes, and no address that they are at");
}

void check_addresses(const U64View& addresses, const U64View& sizes) {
    for (std::size_t i = 0; i < sizes.size(); ++i)
        check_address(addresses.data()[i], sizes.data()[i]);
}

std::uint64_t digest_at(std::uint64_t address, std::uint64_t num_bytes) {
    check_address(address, num_bytes);
    MaybeReleased released(num_bytes);
    return digest(pointer<const std::uint8_t>(address), num_bytes);
}

std::uint64_t hash_blocks_at(std::uint64_t address, std::uint64_t num_bytes, std::uint64_t first_block) {
    check_address(address, num_bytes);
    MaybeReleased released(num_bytes);
    return hash_blocks(pointer<const std::uint8_t>(address), num_bytes, first_block);
}

void digest_each(nb::handle addresses, nb::handle sizes, std::uint64_t out_address, int threads) {
    U64View from(addresses);
    U64View bytes(sizes);
    if (from.size() != bytes.size()) raise_value("addresses and sizes differ in length");
    if (from.size() == 0) return;
    check_addresses(from, bytes);
    std::uint64_t* out = u64_pointer(out_address);
    checked_threads(threads);
    Released released;
    digest_many(from.data(), bytes.data(), from.size(), out, threads);
}

void copy_each(nb::handle sources, nb::handle destinations, nb::handle sizes, std::uint64_t digests_address,
               int threads) {
    U64View from(sources);
    U64View to(destinations);
    U64View bytes(sizes);
    if (from.size() != bytes.size() || to.size() != bytes.size()) {
        raise_value("sources, destinations and sizes differ in length");
    }
    if (from.size() == 0) return;
    check_addresses(from, bytes);
    check_addresses(to, bytes);
    std::uint64_t* digests = u64_pointer(digests_address);
    checked_threads(threads);
    Released released;
    copy_digest(from.data(), to.data(), bytes.data(), from.size(), digests, threads);
}

nb::bytes checksum_at(std::uint64_t address, std::uint64_t num_bytes) {
    check_address(address, num_bytes);
    Checksum sum;
    {
        MaybeReleased released(num_bytes);
        sum = xxh3_128(pointer<const void>(address), num_bytes);
    }
    return bytes_of(sum.data(), sum.size());
}

bool compare_exchange(std::uint64_t address, std::uint64_t expected, std::uint64_t desired) {
    return __atomic_compare_exchange_n(u64_pointer(address), &expected, desired, false, __ATOMIC_ACQ_REL,
                                       __ATOMIC_ACQUIRE);
}

void bind_checksums(nb::module_& module) {
    module.def(
        "xxh3_64",
        [](nb::handle buffer) {
            BytesView view(buffer);
            MaybeReleased released(view.num_bytes());
            return xxh3_64(view.data(), view.num_bytes());
        },
        nb::arg("buffer"));
    module.def(
        "xxh3_128",
        [](nb::handle buffer) {
            BytesView view(buffer);
            return checksum_at(reinterpret_cast<std::uint64_t>(view.data()), view.num_bytes());
        },
        nb::arg("buffer"));
    module.def("xxh3_128_at", checksum_at, nb::arg("address"), nb::arg("num_bytes"));
}

void bind_atomics(nb::module_& module) {
    module.def(
        "load", [](std::uint64_t address) { return __atomic_load_n(u64_pointer(address), __ATOMIC_ACQUIRE); },
        nb::arg("address"));
    module.def(
        "store",
        [](std::uint64_t address, std::uint64_t value) {
            __atomic_store_n(u64_pointer(address), value, __ATOMIC_RELEASE);
        },
        nb::arg("address"), nb::arg("value"));
    module.def("compare_exchange", compare_exchange, nb::arg("address"), nb::arg("expected"),
               nb::arg("desired"));
    module.def(
        "fetch_add",
        [](std::uint64_t address, std::uint64_t value) {
            return __atomic_fetch_add(u64_pointer(address), value, __ATOMIC_ACQ_REL);
        },
        nb::arg("address"), nb::arg("value"));
}

} // namespace

void bind_bytes(nb::module_& module) {
    module.attr("EMPTY_DIGEST") = kEmptyDigest;
    module.def(
        "address_of",
        [](nb::handle buffer) { return reinterpret_cast<std::uint64_t>(BytesView(buffer).data()); },
        nb::arg("buffer"));
    module.def("digest", digest_at, nb::arg("address"), nb::arg("num_bytes"));
    module.attr("BLOCK_BYTES") = kBlockBytes;
    module.def("hash_blocks", hash_blocks_at, nb::arg("address"), nb::arg("num_bytes"),
               nb::arg("first_block"));
    module.def("finish_digest", finish_digest, nb::arg("num_bytes"), nb::arg("hashes"));
    module.def("digest_many", digest_each, nb::arg("addresses"), nb::arg("sizes"), nb::arg("out_address"),
               nb::arg("threads"));
    module.def("copy_digest", copy_each, nb::arg("sources"), nb::arg("destinations"), nb::arg("sizes"),
               nb::arg("digests_address"), nb::arg("threads"));
    bind_checksums(module);
    bind_atomics(module);
}

} // namespace flashckpt
