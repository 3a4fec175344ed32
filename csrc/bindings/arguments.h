// Conversion of Python arguments and results. Only this folder knows Python.
#pragma once

#include "base/error.h"
#include "bindings/held.h"

#include <cstddef>
#include <cstdint>
#include <nanobind/nanobind.h>
#include <string>
#include <vector>

namespace flashckpt {

namespace nb = nanobind;

// Raises an error as OSError with errno and path, ValueError or RuntimeError; does nothing without an error.
void raise_if(const Error& error);
[[noreturn]] void raise_value(const char* message);

// Releases the GIL during its lifetime. Replaces nanobind's class: an ending interpreter kills daemon threads
// when they take the GIL again (held.h), by unwinding their stack. Unwinding out of a destructor calls
// std::terminate, so a finished job would end with SIGABRT.
class Released {
  public:
    Released() : state_(PyEval_SaveThread()) {}
    ~Released() {
        into_python([this] { PyEval_RestoreThread(state_); });
    }
    Released(const Released&) = delete;
    Released& operator=(const Released&) = delete;

  private:
    PyThreadState* state_;
};

// A borrowed C-contiguous buffer.
class BytesView {
  public:
    explicit BytesView(nb::handle object, int flags = PyBUF_SIMPLE);
    ~BytesView() {
        into_python([this] { PyBuffer_Release(&view_); });
    }
    BytesView(const BytesView&) = delete;
    BytesView& operator=(const BytesView&) = delete;

    void* data() const { return view_.buf; }
    std::size_t num_bytes() const { return static_cast<std::size_t>(view_.len); }

  protected:
    Py_buffer view_;
};

// A borrowed buffer of 8-byte integers.
class U64View : public BytesView {
  public:
    explicit U64View(nb::handle object, bool writable = false);

    std::uint64_t* data() const { return static_cast<std::uint64_t*>(view_.buf); }
    std::size_t size() const { return num_bytes() / 8; }
    std::vector<std::uint64_t> copy() const { return {data(), data() + size()}; }
};

// A str, bytes or os.PathLike, in the encoding of the file system.
std::string path_of(nb::handle object);
// The address of a u64. Raises ValueError for null and for an address that is not a multiple of 8.
std::uint64_t* u64_pointer(std::uint64_t address);
nb::bytes bytes_of(const void* data, std::size_t num_bytes);

void bind_bytes(nb::module_& module);
void bind_memory(nb::module_& module);
void bind_files(nb::module_& module);
void bind_planes(nb::module_& module);
void bind_sync(nb::module_& module);
void bind_device(nb::module_& module);
void bind_watch(nb::module_& module);
void bind_standing(nb::module_& module);

} // namespace flashckpt
