// Calls into Python that may run any code, and the references that they return, in a thread that the
// interpreter may kill meanwhile.
//
// Before Python 3.14, an ending interpreter kills daemon threads when they take the GIL again: it unwinds
// their stack, and every destructor on the way would release references without the GIL. So the innermost
// frame blocks the unwinding forever, and the thread ends with the process, as in Python 3.14.
#pragma once

#include <exception>
#include <nanobind/nanobind.h>
#include <unistd.h>
#include <utility>

namespace flashckpt {

namespace nb = nanobind;

[[noreturn]] inline void stay_for_good() {
    for (;;)
        ::pause();
}

// Returns the result of `call`, which must hold nothing that has a destructor.
template <class Call>
auto into_python(Call call) -> decltype(call()) {
    try {
        return call();
    } catch (...) {
        if (std::current_exception() != nullptr) throw;
        stay_for_good(); // no exception: the stack is being unwound
    }
}

// An owned reference. Releasing the last reference may run any code.
class Held {
  public:
    Held() = default;
    Held(Held&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
    Held& operator=(Held&& other) noexcept {
        std::swap(object_, other.object_);
        return *this;
    }
    Held(const Held&) = delete;
    Held& operator=(const Held&) = delete;
    ~Held() {
        if (object_ == nullptr) return;
        into_python([object = object_] { Py_DECREF(object); });
    }

    // Takes ownership of a reference, or holds nothing for null.
    static Held steal(PyObject* object) { return Held(object); }
    static Held borrow(nb::handle object) { return Held(Py_XNewRef(object.ptr())); }

    PyObject* ptr() const { return object_; }
    explicit operator bool() const { return object_ != nullptr; }

  private:
    explicit Held(PyObject* object) : object_(object) {}

    PyObject* object_ = nullptr;
};

// Clears the error of a failed call, but raises errors that end the program (Ctrl-C, SystemExit) or report
// exhausted memory.
inline void forgive() {
    if (PyErr_Occurred() == nullptr) return;
    if (PyErr_ExceptionMatches(PyExc_Exception) == 0 || PyErr_ExceptionMatches(PyExc_MemoryError) != 0)
        throw nb::python_error();
    PyErr_Clear();
}

} // namespace flashckpt
