// Calls into Python that may run any code, and references that they leave behind, in a thread whose life the
// interpreter may take meanwhile.
//
// An interpreter that ends takes its daemon threads' lives where they ask for its lock again (before Python
// 3.14): it unwinds their stack, and every destructor on the way would let go of references without the lock.
// So the innermost frame stops the unwinding, for good: the thread goes with the process, as in Python 3.14.
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

// What `call` gives; it must hold nothing that has a destructor.
template <class Call>
auto into_python(Call call) -> decltype(call()) {
    try {
        return call();
    } catch (...) {
        if (std::current_exception() != nullptr) throw;
        stay_for_good(); // no exception: the stack is being unwound
    }
}

// A reference of ours. Letting go of the last one may run any code.
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

    // Takes over a reference; null is none.
    static Held steal(PyObject* object) { return Held(object); }
    static Held borrow(nb::handle object) { return Held(Py_XNewRef(object.ptr())); }

    PyObject* ptr() const { return object_; }
    explicit operator bool() const { return object_ != nullptr; }

  private:
    explicit Held(PyObject* object) : object_(object) {}

    PyObject* object_ = nullptr;
};

// After a call that failed: forgets what any code may fail with. What ends the program (Ctrl-C, SystemExit)
// or says that there is no memory is raised: it is not ours to swallow.
inline void forgive() {
    if (PyErr_Occurred() == nullptr) return;
    if (PyErr_ExceptionMatches(PyExc_Exception) == 0 || PyErr_ExceptionMatches(PyExc_MemoryError) != 0)
        throw nb::python_error();
    PyErr_Clear();
}

} // namespace flashckpt
