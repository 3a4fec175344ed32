// A tensor's address and layout, without linking torch. Owns the two ways to read them (DLPack's C interface,
// or the tensor's own methods if that fails). Keeps no reference to a tensor.
#pragma once

#include "bindings/arguments.h"
#include "bindings/dlpack.h"

#include <cstdint>
#include <vector>

namespace flashckpt {

// A tensor's address and layout at one moment. Its Python objects are tuples of plain values, which form no
// cycles.
class Look {
  public:
    // For tensors without an address (sparse, meta), only the identity is compared.
    static Look at(nb::handle tensor);

    // Whether pointer, shape, strides and dtype are unchanged and the storage is no smaller. Sets `address`
    // to the current pointer, or 0.
    bool holds(nb::handle tensor, std::uint64_t& address) const;
    std::uint64_t address() const { return address_; }

    // Prefetches the cache lines that `holds` will read. Only a hint, which never reads, so a freed record
    // does no harm.
    void prefetch() const {
        for (std::uintptr_t at = shape_at_ - 64; at != shape_at_ + 192; at += 64)
            __builtin_prefetch(reinterpret_cast<const void*>(at));
    }

  private:
    bool is_same(nb::handle tensor, std::uint64_t& address, std::uintptr_t& shape_at) const;
    bool take_view(nb::handle tensor);
    void take_facts(nb::handle tensor);
    void find_record(nb::handle tensor);

    const dlpack::ExchangeApi* api_ = nullptr; // null: use the tensor's own methods
    std::uint64_t address_ = 0;
    std::uint64_t storage_bytes_ = 0; // 0 if unknown
    dlpack::DataType dtype_{};
    std::uintptr_t shape_at_ = 0;        // address of its shape, usually inside torch's record of the tensor
    std::uintptr_t shape_in_record_ = 0; // offset in the record; 0: use the tensor's own methods
    std::vector<std::int64_t> extents_;  // shape, then strides
    Held facts_;                         // (shape, strides, dtype), or empty if unknown
};

} // namespace flashckpt
