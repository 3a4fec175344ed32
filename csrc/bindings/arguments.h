// What comes from Python and what goes back to it. With the other files of this folder, the only code that
// knows Python.
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

// Raises it: OSError with errno and path, ValueError or RuntimeError; does nothing without an error.
void raise_if(const Error& error);
[[noreturn]] void raise_value(const char* message);

// Gives up the interpreter's lock while it lives. In place of nanobind's: an interpreter that ends takes its
// daemon threads' lives where they ask for the lock again (held.h), by unwinding their stack, and out of a
// destructor that is std::terminate: a job that is done would end with SIGABRT.
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

// The same of 8-byte integers.
class U64View : public BytesView {
  public:
    explicit U64View(nb::handle object, bool writable = false);

    std::uint64_t* data() const { return static_cast<std::uint64_t*>(view_.buf); }
    std::size_t size() const { return num_bytes() / 8; }
    std::vector<std::uint64_t> copy() const { return {data(), data() + size()}; }
};

// str, bytes or os.PathLike, encoded as the file system wants it.
std::string path_of(nb::handle object);
// An address of a u64; refuses what no u64 can have.
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
