// Where a tensor's bytes are and how they lie, without linking torch. Owns the two ways to ask (DLPack's C
// interface, and the tensor's own methods where that says no); keeps no tensor.
#pragma once

#include "bindings/arguments.h"
#include "bindings/dlpack.h"

#include <cstdint>
#include <vector>

namespace flashckpt {

// What a tensor looked like. Python objects in it are plain tuples of plain values: they make no cycles.
class Look {
  public:
    // Of a tensor that tells nothing (sparse, meta) only its identity can be watched.
    static Look at(nb::handle tensor);

    // Whether pointer, shape, strides and dtype are still those, and the storage is no smaller; `address`
    // gets the pointer of now, 0 where the tensor has none.
    bool holds(nb::handle tensor, std::uint64_t& address) const;
    std::uint64_t address() const { return address_; }

    // Asks the processor for the lines in which torch keeps what `holds` will read. A hint only: nothing
    // there is read, so a record that has gone since does no harm.
    void prefetch() const {
        for (std::uintptr_t at = shape_at_ - 64; at != shape_at_ + 192; at += 64)
            __builtin_prefetch(reinterpret_cast<const void*>(at));
    }

  private:
    bool is_same(nb::handle tensor, std::uint64_t& address, std::uintptr_t& shape_at) const;
    bool take_view(nb::handle tensor);
    void take_facts(nb::handle tensor);
    void find_record(nb::handle tensor);

    const dlpack::ExchangeApi* api_ = nullptr; // null: ask the tensor's own methods
    std::uint64_t address_ = 0;
    std::uint64_t storage_bytes_ = 0; // 0 where it tells none
    dlpack::DataType dtype_{};
    std::uintptr_t shape_at_ = 0;        // where its shape was: inside torch's record of the tensor, mostly
    std::uintptr_t shape_in_record_ = 0; // how far; 0: ask the tensor's own methods for its storage
    std::vector<std::int64_t> extents_;  // shape, then strides
    Held facts_;                         // (shape, strides, dtype), or none: it tells nothing
};

} // namespace flashckpt
